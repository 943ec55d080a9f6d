FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY pgqueue pgqueue
COPY relay relay
COPY migrations migrations
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[binary,webhooks,metrics,example]" \
    && rm -r /wheels \
    && useradd --system --no-create-home app
WORKDIR /app
COPY examples examples
USER app
CMD ["pgqueue", "--help"]
