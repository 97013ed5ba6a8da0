"""A Kubernetes cluster as a site: work goes in as Jobs of the mapped namespace, and what became of it is watched, never guessed."""
