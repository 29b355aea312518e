/* A stress of file operations in the way of fsstress: stress SEED PROCESSES OPERATIONS LOOPS [nolinks]
 *
 * Each process has a folder of its own and does to random names in it what random numbers say, whether that is possible or
 * not. What came of it (every errno, every name, mode, link count, size and byte) is summed up in the number that is
 * printed at the end: the same on every file system that behaves as POSIX says. With `nolinks`, there are no hard links:
 * gVisor's files of the host keep the attributes of each name separately, and rename(2) of one link to another, which does
 * nothing by POSIX, removes one. Then no file is renamed to a folder above it either, which is ENOTEMPTY on Linux and
 * EISDIR in gVisor, and no name to itself, which is an error for folders in gVisor's own overlay (ENOTEMPTY). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t state, sum;
static int has_links;

static uint64_t draw(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

/* FNV-1a. */
static void add(const void *bytes, size_t length)
{
	for (const unsigned char *at = bytes; length--; at++)
		sum = (sum ^ *at) * 0x100000001b3;
}

static void add_number(uint64_t number)
{
	add(&number, sizeof number);
}

static void answer(long result)
{
	add_number(result < 0 ? errno : 0);
}

/* One of some hundred names, at most three folders deep. */
static void name(char *to)
{
	char *at = to;
	for (uint64_t depth = draw(3); depth; depth--)
		at += sprintf(at, "d%d/", (int)draw(3));
	sprintf(at, "%c%d", draw(6) ? 'f' : 'd', (int)draw(12));
}

static int is_above(const char *folder, const char *path)
{
	size_t length = strlen(folder);
	return !strncmp(folder, path, length) && path[length] == '/';
}

static void change(void)
{
	static char bytes[1 << 16], one[64], other[64];
	struct stat found;
	int file;
	uint64_t what = draw(100), length = draw(draw(8) ? 8192 : sizeof bytes);

	name(one);
	name(other);
	if (what < 26) { /* write */
		file = open(one, O_WRONLY | O_CREAT | (draw(4) ? 0 : O_TRUNC), 0644);
		answer(file);
		if (file < 0)
			return;
		memset(bytes, 'a' + (int)draw(26), length);
		answer(pwrite(file, bytes, length, draw(1 << 17)));
		close(file);
	} else if (what < 40) { /* read */
		file = open(one, O_RDONLY);
		answer(file);
		if (file < 0)
			return;
		ssize_t got = read(file, bytes, length);
		answer(got);
		if (got > 0)
			add(bytes, got);
		close(file);
	} else if (what < 46) { /* append by a map */
		file = open(one, O_RDWR);
		answer(file);
		if (file < 0)
			return;
		fstat(file, &found);
		if (S_ISREG(found.st_mode) && found.st_size) {
			char *map = mmap(0, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
			if (map != MAP_FAILED) {
				map[draw(found.st_size)] ^= 1;
				munmap(map, found.st_size);
			}
		}
		close(file);
	} else if (what < 50) {
		answer(truncate(one, draw(1 << 17)));
	} else if (what < 62) {
		name(one);
		*(strrchr(one, '/') ? strrchr(one, '/') + 1 : one) = 'd';
		answer(mkdir(one, 0755));
	} else if (what < 72) {
		if (has_links || (strcmp(one, other) && !is_above(other, one)))
			answer(rename(one, other));
	} else if (what < 76) {
		if (has_links)
			answer(link(one, other));
	} else if (what < 79) {
		answer(symlink(one, other));
	} else if (what < 87) {
		answer(unlink(one));
	} else if (what < 89) {
		answer(rmdir(one));
	} else if (what < 95) {
		answer(lstat(one, &found));
	} else if (what < 97) {
		answer(chmod(one, 0600 + draw(64)));
	} else {
		DIR *folder = opendir(one);
		answer(folder ? 0 : -1);
		while (folder && readdir(folder))
			;
		if (folder)
			closedir(folder);
	}
}

/* Sums up what is there, and removes it. */
static void end(const char *folder)
{
	struct dirent **entries;
	int count = scandir(folder, &entries, 0, alphasort);
	if (count < 0 || chdir(folder))
		exit(2);
	for (int i = 0; i < count; i++) {
		const char *entry = entries[i]->d_name;
		static char bytes[1 << 16];
		struct stat found;
		if (!strcmp(entry, ".") || !strcmp(entry, ".."))
			continue;
		if (lstat(entry, &found))
			exit(2);
		add(entry, strlen(entry));
		add_number(found.st_mode);
		if (S_ISDIR(found.st_mode)) {
			chmod(entry, 0700);
			end(entry);
			if (chdir("..") || rmdir(entry))
				exit(2);
			continue;
		}
		add_number(found.st_nlink);
		add_number(found.st_size);
		if (S_ISLNK(found.st_mode)) {
			ssize_t length = readlink(entry, bytes, sizeof bytes);
			add(bytes, length);
		} else {
			int file = open(entry, O_RDONLY);
			for (ssize_t got; (got = read(file, bytes, sizeof bytes)) > 0;)
				add(bytes, got);
			close(file);
		}
		if (unlink(entry))
			exit(2);
	}
}

int main(int count, char **words)
{
	if (count != 5 && count != 6)
		return 2;
	has_links = count == 5;
	uint64_t seed = strtoull(words[1], 0, 10);
	int processes = atoi(words[2]), operations = atoi(words[3]), loops = atoi(words[4]);
	int ends[2];
	if (pipe(ends))
		return 2;
	for (int process = 0; process < processes; process++) {
		if (fork())
			continue;
		char folder[32];
		state = seed * 0x9e3779b97f4a7c15 + process + 1;
		for (int loop = 0; loop < loops; loop++) {
			sprintf(folder, "p%d", process);
			if (mkdir(folder, 0755) || chdir(folder))
				return 2;
			for (int operation = 0; operation < operations; operation++)
				change();
			if (chdir(".."))
				return 2;
			end(folder);
			if (chdir("..") || rmdir(folder))
				return 2;
		}
		return write(ends[1], &sum, sizeof sum) != sizeof sum;
	}
	int failed = 0, status;
	while (wait(&status) > 0)
		failed |= status;
	uint64_t all = 0, one;
	for (int process = 0; process < processes && !failed; process++)
		all += read(ends[0], &one, sizeof one) == sizeof one ? one : 0;
	printf("%016llx\n", (unsigned long long)all);
	return failed ? 1 : 0;
}
