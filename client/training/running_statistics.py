"""Ending a mini-batch of several micro-batches, for all layers of a model."""

from torch import nn

from client.layers.batchnorm import SynchronizedBatchNorm


def commit_running_statistics(model: nn.Module) -> None:
    """Updates the running statistics with the micro-batches that are still pending; call it after each optimizer step.

    With `convert_model(model, chunks=k)` a mini-batch of k micro-batches updates them by itself, and this does nothing.
    Shorter mini-batches need it: the last of an epoch, or 9 samples in 4 chunks, which are 3 micro-batches. All members
    call it; nothing is sent, since all have the same numbers.

    Pending micro-batches are not part of a layer's state: copies, pickles and checkpoints leave them out, and loading a
    state drops them.

    Args:
        model: its synchronised layers, at any depth, end their mini-batch.
    """
    for module in model.modules():
        if isinstance(module, SynchronizedBatchNorm):
            module.commit_running_statistics()
