"""A configuration of MMEngine that names the layer and the hook: torchrun mmengine_program.py DIR."""

from pathlib import Path

from mmcv.cnn import build_norm_layer
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import distributed

from frameworks import small_training as training
from programs.ddp_programs import end_without_teardown

CONFIG = f"""
custom_imports = dict(imports=["client.integrations.mmengine"])
norm_cfg = dict(type="StatsdSyncBN")
custom_hooks = [dict(type="StatsdBNHook", round_timeout=60.0)]

model = dict(type="Network", norm_cfg=norm_cfg)
model_wrapper_cfg = dict(type="MMDistributedDataParallel", device_ids=None)  # for the CPU
train_dataloader = dict(
    batch_size={training.BATCH},
    dataset=dict(type="Samples"),
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="default_collate"),
)
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr={training.LEARNING_RATE}, momentum=0.9))
launcher = "pytorch"
"""


@MODELS.register_module()
class Network(BaseModel):
    def __init__(self, norm_cfg, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.network = training.network(lambda channels: build_norm_layer(norm_cfg, channels)[1])

    def forward(self, x, factors, mode="loss"):
        assert mode == "loss"
        return {"loss": training.loss(self.network(x), factors)}


@DATASETS.register_module()
def Samples():  # noqa: N802 - named as a class in the configuration
    return training.dataset()


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")  # MMEngine's function needs a GPU
    file = folder / f"config_{distributed.get_rank()}.py"
    file.write_text(CONFIG)
    config = Config.fromfile(file)
    config.work_dir = str(folder)
    training.save(Runner.from_cfg(config).train(), folder)


if __name__ == "__main__":
    end_without_teardown(main)
