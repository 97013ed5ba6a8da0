"""What Slurm prints, read by table into parsed types; what is asked of it, built by table. Nothing here runs anything or knows the time."""
