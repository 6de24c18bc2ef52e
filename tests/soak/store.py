"""The store of a soak: moto as a process of its own. Says its address in its first line."""

from __future__ import annotations

import logging

from werkzeug.serving import make_server

from tests.s3server import application


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, application(), threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
