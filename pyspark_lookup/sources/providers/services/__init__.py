"""Tables of services, which options alone describe: an HTTP API that answers in JSON, and Redis.

Each is a provider like any other, which `lookup.provider` names: `http` or `redis`.
"""
