#!/usr/bin/env python
"""Train a GPT. `python pretrain_gpt.py --help` lists the settings; docs/architecture.md shows the
path of a run.
"""

from megatron.program import main

if __name__ == "__main__":
    main()
