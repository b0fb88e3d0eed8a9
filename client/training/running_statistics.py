"""The end of a mini-batch that came in micro-batches, for all layers of a model."""

from torch import nn

from client.layers.batchnorm import SynchronizedBatchNorm


def commit_running_statistics(model: nn.Module) -> None:
    """Moves the running statistics by micro-batches that have not moved them yet: call it after each optimizer step.

    With `convert_model(model, chunks=k)` a mini-batch of k micro-batches moves them by itself, and then this does
    nothing. It is there for mini-batches that have fewer: the last of an epoch, or 9 samples in 4 chunks, which are
    3 micro-batches. All members call it alike; nothing is sent, since they have the same numbers.

    What is pending is no part of a layer's state: copies, pickles and checkpoints do not have it, and loading a state
    forgets it.

    Args:
        model: whose synchronised layers, at any depth, end their mini-batch.
    """
    for module in model.modules():
        if isinstance(module, SynchronizedBatchNorm):
            module.commit_running_statistics()
