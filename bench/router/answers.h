// Bodies: what a request asks of the mock engine, and the documents that answer it.
#pragma once
#include <stdio.h>

#include "json.h"

enum { DOCUMENT_MAX = 1800 };

struct ask {
  int is_chat, is_stream, is_continuing, wants_ids;
  long tokens;  // to emit
  long created;
  char id[300];
};

static void copy_text(char *to, size_t size, struct span text) {
  size_t length = text.end - text.at;
  if (length >= size) length = size - 1;
  memcpy(to, text.at, length);
  to[length] = 0;
}

// `request_id`: the header's, whose id vLLM gives back in its answer.
static struct ask read_ask(struct span body, struct span request_id, int is_chat, int is_prefill) {
  struct ask a = {.is_chat = is_chat, .created = 1700000000};
  struct span params = json_member(body, "kv_transfer_params");
  a.is_stream = json_is(json_member(body, "stream"), "true");
  a.wants_ids = json_is(json_member(body, "return_token_ids"), "true");
  long tokens = json_long(json_member(body, "max_tokens"), 16);
  a.tokens = json_long(json_member(body, "max_completion_tokens"), tokens);
  char echoed[256] = "none";
  if (request_id.at) copy_text(echoed, sizeof echoed, request_id);
  snprintf(a.id, sizeof a.id, "%scmpl-%s", is_chat ? "chat" : "", echoed);
  if (is_prefill) {
    a.is_continuing = json_member(params, "client_max_tokens").at != NULL;
    return a;
  }
  struct span response_id = json_member(params, "response_id");
  if (!response_id.at || *response_id.at != '"') return a;
  a.is_continuing = a.wants_ids = 1;
  copy_text(a.id, sizeof a.id, (struct span){response_id.at + 1, response_id.end - 1});
  a.created = json_long(json_member(params, "created"), a.created);
  // emit_from is [k]: the client has seen k tokens.
  struct span seen = json_member(params, "emit_from");
  if (seen.at) a.tokens -= json_long((struct span){seen.at + 1, seen.end - 1}, 0);
  return a;
}

// A chunk of a stream, its closing brace left out; returns its length.
static int write_chunk(char *to, const struct ask *a, const char *text, int is_end) {
  const char *ids = !a->wants_ids ? "" : is_end ? ",\"token_ids\":[]" : ",\"token_ids\":[1234]";
  const char *end = is_end ? "\"length\"" : "null";
  const char *format =
      a->is_chat ? "{\"id\":\"%s\",\"object\":\"chat.completion.chunk\",\"created\":%ld,"
                   "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"}"
                   "%s,\"logprobs\":null,\"finish_reason\":%s}]"
                 : "{\"id\":\"%s\",\"object\":\"text_completion\",\"created\":%ld,"
                   "\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"%s\""
                   "%s,\"logprobs\":null,\"finish_reason\":%s}]";
  return snprintf(to, DOCUMENT_MAX, format, a->id, a->created, text, ids, end);
}

// A whole answer, with its closing brace; returns its length.
static int write_answer(char *to, const struct ask *a, const char *text, int is_prefill) {
  const char *ids = a->wants_ids ? ",\"token_ids\":[1234]" : "";
  const char *format =
      a->is_chat ? "{\"id\":\"%s\",\"object\":\"chat.completion\",\"created\":%ld,"
                   "\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
                   "\"assistant\",\"content\":\"%s\"}"
                 : "{\"id\":\"%s\",\"object\":\"text_completion\",\"created\":%ld,"
                   "\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"%s\"";
  int n = snprintf(to, DOCUMENT_MAX, format, a->id, a->created, text);
  n += snprintf(to + n, DOCUMENT_MAX - n,
                "%s,\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{"
                "\"prompt_tokens\":128,\"total_tokens\":%ld,\"completion_tokens\":%ld}",
                ids, 128 + a->tokens, a->tokens);
  if (is_prefill && a->is_continuing)
    n += snprintf(to + n, DOCUMENT_MAX - n,
                  ",\"kv_transfer_params\":{\"transfer\":[\"granted\"],"
                  "\"decode_incarnation\":\"mock\",\"prompt_digest\":[\"%064d\"]}", 7);
  to[n++] = '}';
  return n;
}
