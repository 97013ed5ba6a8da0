"""A Kubernetes of our own for tests: the API server's behaviour that we and kubectl rely on, its controllers in small, and pods as real processes.

No real cluster was used to build Intertie: what this package says of Kubernetes is checked against the published schemas (`kubernetes-validate`),
against a real `kubectl` and against `kubernetes_asyncio`, and the suite runs on a real cluster by `INTERTIE_TEST_KUBECONFIG`.

`store` objects, versions, watches · `kinds` what there is · `access` who may do what · `admission` what may be created · `server` HTTP over TLS ·
`controllers` scheduler, Jobs, Kueue · `kubelet` pods on nodes, as processes · `world` all of it, and hands to break it
"""
