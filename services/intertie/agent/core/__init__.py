"""The site's rules as pure functions: which offers are taken, how an attempt lives here, who holds which device, what was used."""
