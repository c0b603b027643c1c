"""Serve the built book on this machine alone, at an address that stays the same.

python -m labkit.book.serve _build/html [--port 8123] [--open]
"""

import argparse
import errno
import functools
import sys
import webbrowser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT = 8123


class _Quiet(SimpleHTTPRequestHandler):
    """Answers as its base does, and logs nothing."""

    def log_message(self, *_: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing if the browser has given up a download; print any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def server(site: Path, port: int = PORT) -> ThreadingHTTPServer:
    """A server of the folder `site` on the loopback interface, not yet running.

    It takes `port`, or, if another program has that, one that the system chooses.
    """
    handler = functools.partial(_Quiet, directory=str(site))
    try:
        return _Server(("127.0.0.1", port), handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return _Server(("127.0.0.1", 0), handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="serve the built book on the loopback interface")
    parser.add_argument("site", type=Path)
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--open", action="store_true", help="open it in the default browser")
    arguments = parser.parse_args()
    if not (arguments.site / "index.html").is_file():
        sys.exit(f"There is no book in {arguments.site}: make book builds it.")
    try:
        listening = server(arguments.site, arguments.port)
    except (OSError, OverflowError) as error:
        sys.exit(f"Port {arguments.port} cannot be used: {error}. Choose another with --port.")
    with listening as running:
        address = f"http://127.0.0.1:{running.server_port}/"
        print(f"The book: {address} (Ctrl-C ends it)", flush=True)
        if arguments.open:
            webbrowser.open(address)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
