"""The router's HTTP surface as an OpenAPI document. Pure: values in, one JSON value out.

`http.app` serves what `document` builds as GET /openapi.json, and `make generate` writes it to
docs/openapi/router.json. Answers that the router writes itself are the structs of `http.shapes`,
so their schemas cannot differ from them; tests compare paths with the app's routes, errors with
those that the code raises, and the whole with what a running router answers.
"""
