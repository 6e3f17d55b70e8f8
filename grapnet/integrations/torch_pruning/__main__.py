"""`python -m grapnet.integrations.torch_pruning script.py [arguments]`: runs a script that imports
torch_pruning on GrapNet.
"""

import runpy
import sys
from pathlib import Path

from . import install


def main() -> None:
    """Runs the script that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m grapnet.integrations.torch_pruning script.py [arguments]")
    install()
    del sys.argv[0]
    # As for any script, its own folder comes first.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
