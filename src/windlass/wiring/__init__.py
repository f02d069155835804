"""The composition root: the only package that knows all the others and puts them together.

Each part is imported when it is asked for: a producer with a DATABASE_URL loads neither the worker nor the embedded
server, and a worker nothing that only people look at.
"""
