"""The audit under its historical name: `auto-research audit`, on CUDA unless `--device` says otherwise."""

from auto_research.cli.audit import script

if __name__ == "__main__":
    script()
