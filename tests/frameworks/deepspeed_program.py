"""DeepSpeed on the CPU: torchrun deepspeed_program.py DIR."""

from pathlib import Path

import deepspeed

import client
from frameworks import small_training as training
from programs.ddp_programs import end_without_teardown


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    model = client.convert_model(training.network().float())  # DeepSpeed reduces no float64
    # DeepSpeed clips gradients by default.
    config = {"train_micro_batch_size_per_gpu": training.BATCH, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=training.optimizer(model), config=config)
    with client.connect():
        for x, factors in training.loader():
            engine.backward(training.loss(engine(x.float()), factors))
            engine.step()
    training.save(engine.module, folder)


if __name__ == "__main__":
    end_without_teardown(main)
