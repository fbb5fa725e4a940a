#!/usr/bin/env bash
# Build the images of operator, router and worker, and push them. `make images`; see usage below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'USAGE'
usage: scripts/images.sh [build] [push] [NAME=VALUE ...]
       make images [push] [NAME=VALUE ...]

build (the default) makes the images; push pushes those that were made with the same values.

  BUILDER=docker|buildah  default: docker where its daemon answers, else buildah
  ONLY=operator,router    which images; default: operator,router,worker
  TAG=0.2.0               default: the project's version
  REGISTRY=host/path      in front of the names, e.g. registry.example.com/llm; needed by push
  VARIANT=cuda|cpu        of the worker's torch; default: cuda. cpu tags the worker TAG-cpu
  BASE=image              with Python 3.11 and its venv module; default: as in the Dockerfile
  INDEX=URL               where packages come from; default: https://pypi.org/simple
  TORCH_INDEX=URL         where VARIANT=cpu finds torch;
                          default: https://download.pytorch.org/whl/cpu
  CA_BUNDLE=file          certificates for the build's downloads, e.g. of a company's proxy;
                          they do not end up in the image
  BUILD_OPTIONS='...'     more options for the builder's build command
  PUSH_OPTIONS='...'      more options for its push command
USAGE
}

say() { printf 'images: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }
has() { command -v "$1" > /dev/null; }

read_arguments() {
  actions=()
  local word
  for word in "$@"; do
    case $word in
      -h | --help | help) usage; exit 0 ;;
      build | push) actions+=("$word") ;;
      BUILDER=* | ONLY=* | TAG=* | REGISTRY=* | VARIANT=* | BASE=* | INDEX=* | TORCH_INDEX=* | \
        CA_BUNDLE=* | BUILD_OPTIONS=* | PUSH_OPTIONS=*) declare -g "$word" ;;
      *) fail "'$word' is not understood; scripts/images.sh --help" ;;
    esac
  done
  [ ${#actions[@]} -gt 0 ] || actions=(build)
}

asked_to() { [[ " ${actions[*]} " == *" $1 "* ]]; }

check_settings() {
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
  : "${BUILDER:=}" "${ONLY:=operator,router,worker}" "${TAG:=$version}" "${REGISTRY:=}"
  : "${VARIANT:=cuda}" "${BASE:=}" "${INDEX:=}" "${CA_BUNDLE:=}"
  : "${BUILD_OPTIONS:=}" "${PUSH_OPTIONS:=}"
  : "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}"
  IFS=, read -r -a names <<< "$ONLY"
  local name
  for name in "${names[@]}"; do
    [[ $name =~ ^(operator|router|worker)$ ]] \
      || fail "ONLY=$ONLY: '$name' is none of operator, router, worker"
  done
  [[ $VARIANT =~ ^(cuda|cpu)$ ]] || fail "VARIANT=$VARIANT is neither cuda nor cpu"
  [[ $TAG =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$ ]] || fail "TAG=$TAG is no image tag"
  [ -n "$REGISTRY" ] || ! asked_to push \
    || fail "push needs REGISTRY, e.g. make images push REGISTRY=registry.example.com/llm"
  [[ $REGISTRY != *://* ]] || fail "REGISTRY=$REGISTRY: without the scheme, e.g. ${REGISTRY#*://}"
  [ -z "$CA_BUNDLE" ] || [ -f "$CA_BUNDLE" ] || fail "CA_BUNDLE=$CA_BUNDLE is no file"
}

find_builder() {
  case $BUILDER in
    docker)
      has docker || fail "docker is not installed"
      docker info > /dev/null 2>&1 || fail "docker's daemon does not answer (docker info)"
      ;;
    buildah) has buildah || fail "buildah is not installed" ;;
    "")
      if has docker && docker info > /dev/null 2>&1; then
        BUILDER=docker
      elif has buildah; then
        BUILDER=buildah
      else
        fail "neither docker (with a daemon that answers) nor buildah is installed"
      fi
      ;;
    *) fail "BUILDER=$BUILDER is neither docker nor buildah" ;;
  esac
}

# The base is fetched first, so that a registry that does not answer is named at once.
fetch_base() {
  local base
  base=${BASE:-$(sed -n 's/^ARG BASE=//p' Dockerfile)}
  "$BUILDER" inspect --type image "$base" > /dev/null 2>&1 && return
  say "fetching the base $base"
  "$BUILDER" pull --quiet "$base" > /dev/null \
    || fail "the base $base is neither here nor can it be fetched; BASE=... names another"
}

image_name() {
  local suffix=
  if [ "$1" = worker ] && [ "$VARIANT" = cpu ]; then suffix=-cpu; fi
  echo "${REGISTRY:+${REGISTRY%/}/}xpyd-$1:$TAG$suffix"
}

build_one() {
  local name=$1 options=()
  options+=(--file Dockerfile --target "$name" --tag "$(image_name "$name")")
  options+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
  if [ -n "$BASE" ]; then options+=(--build-arg "BASE=$BASE"); fi
  if [ -n "$INDEX" ]; then options+=(--build-arg "INDEX=$INDEX"); fi
  if [ -n "$CA_BUNDLE" ]; then options+=(--secret "id=ca,src=$CA_BUNDLE"); fi
  if [ "$name" = worker ] && [ "$VARIANT" = cpu ]; then
    options+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
  fi
  if [ "$BUILDER" = buildah ]; then options+=(--layers); fi # docker caches layers unasked
  # shellcheck disable=SC2086  # words of their own
  DOCKER_BUILDKIT=1 "$BUILDER" build "${options[@]}" $BUILD_OPTIONS .
}

push_one() {
  # shellcheck disable=SC2086  # words of their own
  "$BUILDER" push $PUSH_OPTIONS "$(image_name "$1")"
}

# Said before anything is pushed: half a set of images is of no use.
check_built() {
  local name
  for name in "${names[@]}"; do
    "$BUILDER" inspect --type image "$(image_name "$name")" > /dev/null 2>&1 \
      || fail "$(image_name "$name") is not built: scripts/images.sh build with the same values"
  done
}

# The chart's settings that say where the images are.
chart_settings() {
  local name tag words="--set images.registry=${REGISTRY%/}"
  for name in "${names[@]}"; do
    tag=$(image_name "$name")
    tag=${tag##*:}
    if [ "$tag" != "$version" ]; then words+=" --set-string images.$name.tag=$tag"; fi
  done
  echo "$words"
}

read_arguments "$@"
check_settings
find_builder
if asked_to build; then fetch_base; else check_built; fi
revision=$(git rev-parse --short=12 HEAD 2> /dev/null || echo unknown)
table=$(printf '%-48s %10s %8s' image size seconds)
number=0
for name in "${names[@]}"; do
  number=$((number + 1))
  started=$SECONDS
  for action in build push; do
    asked_to "$action" || continue
    say "[$number/${#names[@]}] $action $(image_name "$name") with $BUILDER"
    "${action}_one" "$name"
  done
  size=$("$BUILDER" images --format '{{.Size}}' "$(image_name "$name")")
  table+=$'\n'$(printf '%-48s %10s %8d' "$(image_name "$name")" "$size" $((SECONDS - started)))
done
printf '%s\n' "$table"
if asked_to push; then say "the chart finds them with: $(chart_settings)"; fi
