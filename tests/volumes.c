/*
 * The rules of a Unity Catalog volume for one folder, under LD_PRELOAD:
 *
 * - a file is written once, from its first byte to its last: no append, no write after a seek, no
 *   write into a file that is there (unless it is emptied), no truncation, no shared mapping that
 *   can be written;
 * - renaming a file copies it and deletes the original; a folder cannot be renamed;
 * - no links, no locks; fsync promises nothing; the storage has no size.
 *
 * Everything else gets EOPNOTSUPP. Environment:
 *   VOLUME        the folder
 *   VOLUME_LOG    a file to which every refusal is added, a line each
 *   VOLUME_FULL   a file; while it is there, writing into the folder gets ENOSPC
 *   VOLUME_GATE   a file; while it is there, opening a file to write below VOLUME waits
 *   VOLUME_FIXED  a file; while it is there, no file can be renamed either
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATHS (2 * PATH_MAX) /* a folder and a name */
#define MAX_FD 65536
static char tracked[MAX_FD];      /* opened below the folder to be written */
static off_t written[MAX_FD];     /* bytes that were written so far */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* The absolute path of a path relative to a folder's descriptor, links not followed. */
static void absolute(int dir, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (path[0] != '/') {
        if (dir == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) base[0] = 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            ssize_t size = readlink(link, base, sizeof base - 1);
            base[size < 0 ? 0 : size] = 0;
        }
    }
    snprintf(out, PATHS, "%s%s%s", base, base[0] ? "/" : "", path);
}

static int inside(int dir, const char *path) {
    const char *folder = getenv("VOLUME");
    if (!folder || !path) return 0;
    char full[PATHS];
    absolute(dir, path, full);
    size_t size = strlen(folder);
    return strncmp(full, folder, size) == 0 && (full[size] == '/' || full[size] == 0);
}

static int refuse(const char *what, const char *path) {
    const char *log = getenv("VOLUME_LOG");
    if (log) {
        char line[PATH_MAX + 64];
        int size = snprintf(line, sizeof line, "%s %s\n", what, path ? path : "");
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0644);
        if (file >= 0) {
            syscall(SYS_write, file, line, size);
            syscall(SYS_close, file);
        }
    }
    errno = EOPNOTSUPP;
    return -1;
}

static int refuse_fd(const char *what, int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    return refuse(what, path);
}

static int present(const char *variable) {
    const char *path = getenv(variable);
    return path && syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

static void track(int fd, int on) {
    if (fd >= 0 && fd < MAX_FD) {
        tracked[fd] = on;
        written[fd] = 0;
    }
}

static int is_tracked(int fd) { return fd >= 0 && fd < MAX_FD && tracked[fd]; }

/* Opening */

static int wait_and_open(int dir, const char *path, int flags, mode_t mode) {
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    int ours = inside(dir, path);
    if (ours && writes) {
        while (present("VOLUME_GATE")) usleep(20000);
        if (flags & O_APPEND) return refuse("append", path);
        if (!(flags & (O_TRUNC | O_EXCL)) && syscall(SYS_faccessat, dir, path, F_OK) == 0)
            return refuse("write-into", path);
    }
    int fd = syscall(SYS_openat, dir, path, flags, mode);
    track(fd, ours && writes);
    return fd;
}

#define MODE(last)                        \
    mode_t mode = 0;                      \
    if (flags & (O_CREAT | O_TMPFILE)) {  \
        va_list list;                     \
        va_start(list, last);             \
        mode = va_arg(list, mode_t);      \
        va_end(list);                     \
    }

int open(const char *path, int flags, ...) { MODE(flags) return wait_and_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return wait_and_open(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE(flags) return wait_and_open(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE(flags) return wait_and_open(dir, path, flags | O_LARGEFILE, mode); }
int __open_2(const char *path, int flags) { return wait_and_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return wait_and_open(AT_FDCWD, path, flags, 0); }
int creat(const char *path, mode_t mode) { return wait_and_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* C's own streams write without what is below; nothing may use them on a volume. */
static FILE *open_stream(const char *name, const char *path, const char *mode) {
    if (inside(AT_FDCWD, path) && strpbrk(mode, "wa+")) {
        refuse("stream", path);
        return NULL;
    }
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, name);
    return real(path, mode);
}
FILE *fopen(const char *path, const char *mode) { return open_stream("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return open_stream("fopen64", path, mode); }

int close(int fd) {
    track(fd, 0);
    return syscall(SYS_close, fd);
}

/* Writing */

static int may_write(int fd, off_t at) {
    if (!is_tracked(fd)) return 1;
    if (present("VOLUME_FULL")) {
        errno = ENOSPC;
        return 0;
    }
    if (at != written[fd]) {
        refuse_fd("seek-and-write", fd);
        return 0;
    }
    return 1;
}

static ssize_t wrote(int fd, ssize_t size) {
    if (size > 0 && is_tracked(fd)) written[fd] += size;
    return size;
}

static off_t here(int fd) { return is_tracked(fd) ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : 0; }

ssize_t write(int fd, const void *data, size_t size) {
    return may_write(fd, here(fd)) ? wrote(fd, syscall(SYS_write, fd, data, size)) : -1;
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return may_write(fd, here(fd)) ? wrote(fd, syscall(SYS_writev, fd, parts, count)) : -1;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    if (is_tracked(fd)) return refuse_fd("pwrite", fd);
    return syscall(SYS_pwrite64, fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    if (is_tracked(fd)) return refuse_fd("pwritev", fd);
    return syscall(SYS_pwritev, fd, parts, count, (long)at, (long)((unsigned long)at >> 32));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return pwritev(fd, parts, count, at); }
ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    return may_write(out, here(out)) ? wrote(out, syscall(SYS_sendfile, out, in, offset, size)) : -1;
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) { return sendfile(out, in, offset, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    if (is_tracked(out)) return refuse_fd("copy_file_range", out);
    return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
}
int ftruncate(int fd, off_t size) {
    if (is_tracked(fd)) return refuse_fd("ftruncate", fd);
    return syscall(SYS_ftruncate, fd, size);
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
    if (inside(AT_FDCWD, path)) return refuse("truncate", path);
    return syscall(SYS_truncate, path, size);
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }
int fallocate(int fd, int mode, off_t from, off_t size) {
    if (is_tracked(fd)) return refuse_fd("fallocate", fd);
    return syscall(SYS_fallocate, fd, mode, from, size);
}
int posix_fallocate(int fd, off_t from, off_t size) {
    if (is_tracked(fd)) return refuse_fd("posix_fallocate", fd), EOPNOTSUPP;
    return syscall(SYS_fallocate, fd, 0, from, size) ? errno : 0;
}
int posix_fallocate64(int fd, off64_t from, off64_t size) { return posix_fallocate(fd, from, size); }
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t from) {
    if (is_tracked(fd) && (protection & PROT_WRITE) && (flags & MAP_SHARED)) {
        refuse_fd("mmap", fd);
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, from);
}
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t from) { return mmap(at, size, protection, flags, fd, from); }
int fsync(int fd) { return is_tracked(fd) ? 0 : syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return is_tracked(fd) ? 0 : syscall(SYS_fdatasync, fd); }

/* Names */

/* A copy, byte by byte, and then the original is deleted: another process sees it half done. */
static int move(int from_dir, const char *from, int to_dir, const char *to) {
    struct stat found;
    if (fstatat(from_dir, from, &found, AT_SYMLINK_NOFOLLOW)) return -1;
    if (S_ISDIR(found.st_mode)) return refuse("rename-folder", from);
    if (present("VOLUME_FULL") || present("VOLUME_FIXED")) {
        errno = present("VOLUME_FULL") ? ENOSPC : EOPNOTSUPP;
        return -1;
    }
    int source = syscall(SYS_openat, from_dir, from, O_RDONLY, 0);
    int target = syscall(SYS_openat, to_dir, to, O_WRONLY | O_CREAT | O_TRUNC, found.st_mode);
    if (source < 0 || target < 0) return -1;
    char block[65536];
    ssize_t size;
    while ((size = syscall(SYS_read, source, block, sizeof block)) > 0)
        if (syscall(SYS_write, target, block, size) != size) return -1;
    syscall(SYS_close, source);
    syscall(SYS_close, target);
    return syscall(SYS_unlinkat, from_dir, from, 0);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    if (inside(from_dir, from) || inside(to_dir, to)) {
        if (!inside(from_dir, from) || !inside(to_dir, to)) {
            errno = EXDEV;
            return -1;
        }
        return flags ? refuse("renameat2", from) : move(from_dir, from, to_dir, to);
    }
    return syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
}
int renameat(int from_dir, const char *from, int to_dir, const char *to) { return renameat2(from_dir, from, to_dir, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    if (inside(to_dir, to)) return refuse("link", to);
    return syscall(SYS_linkat, from_dir, from, to_dir, to, flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlinkat(const char *from, int to_dir, const char *to) {
    if (inside(to_dir, to)) return refuse("symlink", to);
    return syscall(SYS_symlinkat, from, to_dir, to);
}
int symlink(const char *from, const char *to) { return symlinkat(from, AT_FDCWD, to); }
int flock(int fd, int operation) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    if (inside(AT_FDCWD, path)) return refuse("flock", path);
    return syscall(SYS_flock, fd, operation);
}

int statvfs(const char *path, struct statvfs *out) {
    int code = REAL(statvfs)(path, out);
    if (!code && inside(AT_FDCWD, path)) out->f_blocks = out->f_bfree = out->f_bavail = 0;
    return code;
}
int statvfs64(const char *path, struct statvfs64 *out) {
    int code = REAL(statvfs64)(path, out);
    if (!code && inside(AT_FDCWD, path)) out->f_blocks = out->f_bfree = out->f_bavail = 0;
    return code;
}
