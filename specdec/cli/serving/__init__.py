"""The server behind `specdec serve`: OpenAI's requests in, a worker thread that owns the decoder, metrics out.

FastAPI, uvicorn and prometheus_client (the extra `serve`) are imported here and nowhere else.
"""
