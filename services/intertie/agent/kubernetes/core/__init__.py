"""What Kubernetes' words mean, what a Job of ours looks like, and what the owner applies: pure."""
