"""What the GPU check looks at: functions of parts, called by name (`parts.py`)."""
