"""The audit: compares KV that was computed or restored with what is stored under the same keys.

Imports the ground floor only. The engine and the vLLM connector drive it through `Auditor`.
"""
