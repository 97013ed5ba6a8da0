"""The bus: one small port (`port`), two that pass the same suite (`nats`, `memory`), typed calls on top (`rpc`)."""
