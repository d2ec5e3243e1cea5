"""The translation server: LibreTranslate's HTTP API, an extended API under /v1, and a web page.

A request passes through these modules, from the socket to the search:

    server, protocol        connections, and limits on them
    app, middleware         the ASGI application; ids, log, limits and errors of all requests
    api, v1, v1_*           the routes
    parameters, access      parameters of a request; its API key, rate and size
    service                 the state that the routes share
    models, languages       the loaded models, their directions and languages
    text_translation        translation of texts and documents, sentence by sentence
    file_process, encoding  processes that read files and encode long texts
    downloads               translated files
    scheduler, queues       requests that wait, and the results of their lines
    round_runner, rounds    sentences of several requests that are searched together
    worker_pool, worker_process             processes that search

A request has texts, which are split into sentences. The scheduler gets each sentence as a line. A
line has one segment of token ids, or several if it is too long for the model. A round is a search
of segments of one or more clients.
"""
