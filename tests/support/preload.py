"""The imports of the forkserver, done once since they take seconds, and inherited by every worker.

None of it may start CUDA: tests/test_environment.py.
"""

import gc
from functools import cache

gc.disable()  # nothing here is garbage, and to look through it takes a second

import tests.support.gpu_watch  # noqa: E402, F401, I001  (before all else)
import training.run  # noqa: E402, F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401  (imported by every engine, and imports torch's compiler)
import peft  # noqa: E402, F401
from tests.support.environment import leave_flushing_to_the_system  # noqa: E402
from training.costs import hardware  # noqa: E402
from training.observability import environment  # noqa: E402
from training.planner import prediction  # noqa: E402

# A worker runs many runs, and the machine stays the same: it is measured once, as are the files of conf/hardware read,
# and the state of the sources.
hardware.measure_host = cache(hardware.measure_host)
prediction.load_hardware = cache(prediction.load_hardware)
environment._describe_source = cache(environment._describe_source)
leave_flushing_to_the_system()

gc.freeze()
gc.enable()
