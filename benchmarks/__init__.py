"""What things cost: cases as data, checked before they are timed.

Threads wait for each other awake: where they may sleep, waking them takes as long as a short step,
or does not, and two runs differ by a factor of two. This must be said before torch is imported.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "active")
