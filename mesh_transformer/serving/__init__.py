"""A server for many askers of one model: continuous batching behind the OpenAI API and the 2021 library's.

From the ground up: `limits` (what a request may ask), `api_errors` (what is said where it may not), `waiting` (a
bounded, fair queue), `engine` (the one thread that owns the devices), `exchange` (one HTTP request's part in it),
`schemas`, `complete_api`, `openai_api` and `page` (what clients see), `middleware`, `app` and `lifecycle`.
"""
