"""Shared definitions, each written once: configuration, descriptor, registers, queue layout, status codes.

Nothing in this package imports an HDL library, so models and host code can use it alone.
"""
