"""Where a job runs: isolated processes of this machine, or a Ray cluster, behind one interface."""
