"""The dashboard: view models by subject, templates and static files.

Everything here is pure: a page is a function of the data and of the viewer. Nothing is loaded from other hosts, nothing
needs a build step, and every page can be read and used without JavaScript.
"""
