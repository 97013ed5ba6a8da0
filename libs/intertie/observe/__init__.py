"""What a process says about itself: logs without secrets (`log`, `redact`), traces (`tracing`), metrics with bounded labels (`metrics`).

Observing never blocks work and never raises into it; without a backend it costs next to nothing.
"""
