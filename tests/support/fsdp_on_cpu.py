"""`nlq` with FSDP on CPU processes: `torchrun --nproc-per-node 2 -m support.fsdp_on_cpu train RECIPE`.

Accelerate reads the settings of FSDP on every device, but turns it on for accelerators only. What it then calls
(`fully_shard`, distributed checkpoints) works on CPU processes with gloo, so this program turns it on.
"""

import sys

import accelerate.accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from nlq import main


class FSDPOnCPU(AcceleratorState):
    """Keeps the settings of FSDP, which `AcceleratorState` drops on a CPU."""

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    accelerate.accelerator.AcceleratorState = FSDPOnCPU
    sys.exit(main(sys.argv[1:]))
