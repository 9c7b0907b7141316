/* Ends the process, or has the disk refuse, at the n-th call that changes a file below a folder: LD_PRELOAD of disks.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KILL, KILL_IN_WRITE, REFUSE };
static char root[4096];
static long count, at, times;
static int kind, code;

void begin(const char *folder, long call, int what, int error, long most) {
    strncpy(root, folder, sizeof root - 1);
    count = 0, at = call, kind = what, code = error, times = most;
}

long calls(void) { return count; }

static int below(const char *path) { return *root && path && !strncmp(path, root, strlen(root)); }

static int of(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = *root ? readlink(link, path, sizeof path - 1) : -1;
    return length >= 0 && (path[length] = 0, below(path));
}

static int refused(int counts) {
    if (!counts || ++count < at || count >= at + times) return 0;
    if (kind == KILL || kind == KILL_IN_WRITE) kill(getpid(), SIGKILL);
    errno = code;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list more;                                                                       \
        va_start(more, flags);                                                              \
        mode_t mode = va_arg(more, mode_t);                                                 \
        va_end(more);                                                                       \
        return refused((flags & O_CREAT) && below(path)) ? -1 : NEXT(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *bytes, size_t size) {
    int counts = of(file);
    if (counts && kind == KILL_IN_WRITE && count + 1 == at) NEXT(write)(file, bytes, size / 2);
    return refused(counts) ? -1 : NEXT(write)(file, bytes, size);
}

int fsync(int file) { return refused(of(file)) ? -1 : NEXT(fsync)(file); }
int rename(const char *from, const char *to) { return refused(below(to)) ? -1 : NEXT(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return refused(below(path)) ? -1 : NEXT(mkdir)(path, mode); }
int chmod(const char *path, mode_t mode) { return refused(below(path)) ? -1 : NEXT(chmod)(path, mode); }
