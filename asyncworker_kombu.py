"""Makes `broker_url = "asyncworker://"` known to kombu, in every process that imports kombu.

kombu has an entry point for serializers, which it loads with itself, and none for transports. So this module is named
there (`kombu.serializers`), and adds the transport's name when it is loaded. It stands outside of the package: who
imports kombu and sends nothing here shall not pay for the import of asyncworker.
"""

from __future__ import annotations

import json

from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES.setdefault("asyncworker", "asyncworker.celery.transport:Transport")

#: What kombu registers as a serializer: plain JSON under a name that nothing uses.
serializer = (json.dumps, json.loads, "application/x-asyncworker", "utf-8")
