"""The composition root: the only package that imports all others and connects them.

Heavy optional parts (the embedded database, provider SDKs, the HTTP server, Ray) are imported when they are used: a
producer with a DATABASE_URL loads neither the worker nor the embedded server.
"""
