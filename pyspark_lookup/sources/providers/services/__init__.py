"""Tables of services, which users describe by options, without code: an HTTP API that answers in JSON, and Redis.

Each is a provider like any other, which `lookup.provider` names: `http` or `redis`.
"""
