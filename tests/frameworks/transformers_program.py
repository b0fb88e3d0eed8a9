"""Hugging Face's `Trainer`: torchrun transformers_program.py DIR."""

from pathlib import Path

from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

import client
from frameworks import small_training as training
from programs.ddp_programs import end_without_teardown


class Network(nn.Module):
    """Returns its loss, as the trainer expects."""

    def __init__(self):
        super().__init__()
        self.network = training.network()

    def forward(self, x, factors):
        return {"loss": training.loss(self.network(x), factors)}


class InOrder(Trainer):
    """Does not shuffle, so that each step's batches make a whole batch."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def main(folder: Path) -> None:
    model = client.convert_model(Network())
    steps = training.optimizer(model)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=training.BATCH,
        num_train_epochs=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"x": x, "factors": factors} for x, factors in training.dataset()]
    trainer = InOrder(model, arguments, train_dataset=data, optimizers=(steps, ConstantLR(steps, 1.0, 1)))
    with client.connect():
        trainer.train()
    training.save(model, folder)


if __name__ == "__main__":
    end_without_teardown(main)
