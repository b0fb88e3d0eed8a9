"""Torch's own distributed tests of synchronised batch norm, by name."""

_OF_DDP = "test_DistributedDataParallel_SyncBatchNorm"

# Torch runs these with two ranks only.
OF_TWO_RANKS = [f"{_OF_DDP}_Single_Input_Per_Process"]

TESTS = [
    *(_OF_DDP, f"{_OF_DDP}_No_Affine", f"{_OF_DDP}_2D_Input", f"{_OF_DDP}_Channels_Last"),
    *(f"{_OF_DDP}_Diff_Input_Sizes_Running_Value", f"{_OF_DDP}_Diff_Input_Sizes_gradient", f"{_OF_DDP}_half"),
    *("test_SyncBatchNorm_process_group", "test_ddp_inference", "test_ddp_uneven_inputs_stop_iteration_sync_bn"),
    "test_sync_bn_logged",
    *OF_TWO_RANKS,
]


def names_for(nr_ranks: int) -> list[str]:
    return [name for name in TESTS if nr_ranks == 2 or name not in OF_TWO_RANKS]
