"""The Ray actors and everything that starts, calls and ends them.

Ray reads its environment variables when it is imported. They are set here because every import of Ray in this package
goes through this module. Values that the user has set are kept.

The head of a cluster keeps a record of 3 to 4 KiB of every call of an actor: of 100,000 of them unless told otherwise, 340 MiB, and a run with
64 ranks makes as many in minutes. `observe.timeline` is made from them. Of older calls it keeps the ids: of a million of them unless told otherwise.
"""

import os as _os

for _name, _value in {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_task_events_max_num_task_in_gcs": "10000",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": "1000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}.items():
    _os.environ.setdefault(_name, _value)
