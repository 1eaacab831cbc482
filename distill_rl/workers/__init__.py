"""The Ray actors and everything that starts, calls and ends them.

Ray reads its environment variables when it is imported. They are set here because every import of Ray in this package
goes through this module. Values that the user has set are kept.
"""

import os as _os

for _name, _value in {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}.items():
    _os.environ.setdefault(_name, _value)
