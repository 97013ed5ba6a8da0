"""Service access: the owner's call offerings, and the calls that the hub's tenants make to them. The site opens no port."""
