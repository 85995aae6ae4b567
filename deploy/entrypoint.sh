#!/bin/sh
# Puts the kernels that were compiled with the image where numba can use them: it ignores a folder that it cannot write.
# Without a writable /tmp they are compiled in memory at each start.
set -eu
if [ ! -d "$NUMBA_CACHE_DIR" ]; then
    cp -r /opt/paramserver/kernels "$NUMBA_CACHE_DIR" || true
fi
exec "$@"
