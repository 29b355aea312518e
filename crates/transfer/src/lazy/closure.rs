//! Finds the files that the start of an image needs before its own code runs: the program, its loader and libraries,
//! and the interpreters of scripts. They replace a recorded start where the program cannot run.
//!
//! The files are hostile, so all lists have limits. Beyond a limit, further files are left out.

mod elf;
mod resolve;

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;

use image::erofs::read::{ByteOffset, Cached, Image, Inode, Nid, ReadAt, ReadError, RunPlace};
use image::lazy::hot::BLOCK;
use image::verity::DeviceId;
use store::{OpenImage, TraceRun};

pub use elf::exercise as exercise_elf;
use elf::{ElfFile, Machine};
use resolve::{Found, LOOKUPS_MAX, Root};

/// Maximum number of blocks in a closure: 32 MiB. It is only a guess at what the start reads.
const BLOCKS_MAX: usize = 2048;
/// Maximum number of files in a closure. Programs have up to a few hundred libraries.
const FILES_MAX: usize = 1024;
/// Part of each segment of a program or library, and of each other file, that is in the closure, in bytes. A start
/// reads only the beginning of large programs in order.
const SEGMENT_MAX: u64 = 4 << 20;
/// Directories in which a command is searched if the config has no `PATH`. Source: runc `libcontainer`, whose default
/// is that of Docker.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Maximum number of words of a command that are programs.
const WORDS_MAX: usize = 16;
/// Maximum number of directories in a search path.
const PATH_MAX: usize = 64;
/// Maximum number of configuration files of the loader, and of the directories that they name.
const CONF_FILES_MAX: usize = 64;
const CONFIGURED_MAX: usize = 256;
/// Directories of libraries that need no configuration, for glibc. Source: ld.so(8).
const OF_GLIBC: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// The same for musl, if there is no configuration. Source: musl `ldso/dynlink.c`, `sys_path`.
const OF_MUSL: [&str; 3] = ["/lib", "/usr/local/lib", "/usr/lib"];
/// The cache of glibc's loader, which it reads first.
const CACHE: &[u8] = b"/etc/ld.so.cache";
/// Maximum length of the first line of a script. Source: Linux `include/uapi/linux/binfmts.h`, `BINPRM_BUF_SIZE`.
const SCRIPT_LINE: u64 = 256;
/// Maximum length of a configuration file of the loader, in bytes.
const CONF_MAX: u64 = 64 << 10;

/// The command of an image's start.
#[derive(Debug, Clone, Copy)]
pub struct StartCommand<'a> {
    /// Entrypoint and command.
    pub words: &'a [String],
    /// Environment variables, as `NAME=VALUE`.
    pub env: &'a [String],
    /// Working directory; empty for `/`.
    pub directory: &'a str,
}

impl StartCommand<'_> {
    fn variable(&self, name: &str) -> Option<&str> {
        let value = |it: &'_ String| it.strip_prefix(name)?.strip_prefix('=').map(str::len);
        // The last one counts, as for a program that reads its environment into a map.
        let variable = self.env.iter().rev().find(|it| value(it).is_some())?;
        variable.get(name.len() + 1..)
    }
}

/// Returns the blocks of the files that a start needs, in the order in which it needs them. Each block occurs once. The
/// result is empty if the command is not in the image.
///
/// # Errors
/// [`ReadError`] if the image is damaged, or cannot be read. Damaged programs have no libraries.
pub fn closure(image: &OpenImage, start: &StartCommand<'_>) -> Result<Vec<TraceRun>, ReadError> {
    let devices: Vec<DeviceFile<'_>> = image.devices.iter().map(DeviceFile).collect();
    let devices: Vec<&dyn ReadAt> = devices.iter().map(|it| it as &dyn ReadAt).collect();
    let opened = Image::open(Cached::new(&image.image))?;
    let root = Root { image: &opened, devices: &devices, lookups: &Cell::new(LOOKUPS_MAX) };
    let mut closure = Closure {
        directories: usual_directories(&root)?,
        root,
        ids: image.devices.iter().map(|it| it.id).collect(),
        start,
        inherited: Vec::new(),
        waiting: VecDeque::new(),
        seen: BTreeSet::new(),
        searched: BTreeSet::new(),
        blocks: BTreeSet::new(),
        runs: Vec::new(),
    };
    closure.begin()?;
    while let Some(file) = closure.waiting.pop_front() {
        closure.add(&file)?;
    }
    Ok(closure.runs)
}

/// A device of the image.
struct DeviceFile<'a>(&'a store::OpenDevice);

impl ReadAt for DeviceFile<'_> {
    fn len(&self) -> u64 {
        self.0.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0.file, buffer, offset)
    }
}

/// The files that were found so far.
struct Closure<'a, S> {
    root: Root<'a, S>,
    ids: Vec<DeviceId>,
    start: &'a StartCommand<'a>,
    /// Directories of libraries of this image, in the order in which its loader searches them.
    directories: Vec<Vec<u8>>,
    /// The `DT_RPATH` of programs, which their libraries inherit.
    inherited: Vec<Vec<u8>>,
    waiting: VecDeque<Found>,
    seen: BTreeSet<Nid>,
    /// Names of libraries that were searched. The loader searches each once.
    searched: BTreeSet<(Machine, Vec<u8>)>,
    blocks: BTreeSet<(DeviceId, u32)>,
    runs: Vec<TraceRun>,
}

impl<S: ReadAt> Closure<'_, S> {
    /// Adds the programs that the command names.
    fn begin(&mut self) -> Result<(), ReadError> {
        let start = self.start;
        let Some((first, others)) = start.words.split_first() else { return Ok(()) };
        let Some(program) = self.command(first)? else { return Ok(()) };
        self.waiting.push_back(program);
        // An entrypoint is often a script that executes its arguments, or a shell that executes a text.
        let programs =
            others.iter().filter_map(|it| it.split_whitespace().find(|it| *it != "exec"));
        for word in programs.filter(|it| !it.starts_with('-') && !it.contains('=')).take(WORDS_MAX)
        {
            let found = self.command(word)?;
            self.waiting.extend(found);
        }
        Ok(())
    }

    /// Returns the program that a command names.
    fn command(&self, word: &str) -> Result<Option<Found>, ReadError> {
        let in_directory = |directory: &str| self.executable(&format!("{directory}/{word}"));
        if word.is_empty() {
            return Ok(None);
        }
        if word.contains('/') {
            return match word.starts_with('/') {
                true => self.executable(word),
                false => in_directory(self.start.directory),
            };
        }
        let path = self.start.variable("PATH").unwrap_or(PATH);
        for directory in path.split(':').filter(|it| it.starts_with('/')).take(PATH_MAX) {
            if let Some(found) = in_directory(directory)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn executable(&self, path: &str) -> Result<Option<Found>, ReadError> {
        let found = self.root.find_regular(path.as_bytes())?;
        Ok(found.filter(|it| it.inode.mode() & 0o111 != 0))
    }

    /// Adds a file, and puts the files that it needs on the list.
    fn add(&mut self, found: &Found) -> Result<(), ReadError> {
        let inode = &found.inode;
        if self.seen.len() >= FILES_MAX || !self.seen.insert(inode.nid()) {
            return Ok(());
        }
        let line = self.root.beginning(inode, SCRIPT_LINE)?;
        if let Some(line) = line.strip_prefix(b"#!") {
            self.add_blocks(inode, 0..inode.size())?;
            return self.add_interpreter(line);
        }
        let Some(elf) = elf::parse(self.root.reader(*inode)) else {
            return self.add_blocks(inode, 0..inode.size());
        };
        for segment in &elf.segments {
            self.add_blocks(inode, segment.clone())?;
        }
        if let Some(loader) = &elf.loader
            && let Some(loader) = self.root.find_regular(loader)?
        {
            // glibc's loader is beside the libraries of C.
            if !self.directories.contains(&loader.directory) {
                self.directories.push(loader.directory.clone());
            }
            self.waiting.push_back(loader);
            self.waiting.extend(self.root.find_regular(CACHE)?);
            if elf.runpath.is_empty() {
                self.inherited = with_origin(&elf.rpath, &found.directory);
            }
        }
        for name in &elf.needed {
            if self.searched.insert((elf.machine, name.clone())) {
                let library = self.library(found, &elf, name)?;
                self.waiting.extend(library);
            }
        }
        Ok(())
    }

    /// Adds the interpreter that the first line of a script names. Source: Linux `fs/binfmt_script.c`.
    fn add_interpreter(&mut self, line: &[u8]) -> Result<(), ReadError> {
        let line = line.split(|it| *it == b'\n').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        let mut words = line.split([' ', '\t']).filter(|it| !it.is_empty());
        let Some(interpreter) = words.next() else { return Ok(()) };
        self.waiting.extend(self.executable(interpreter)?);
        // `env` executes the program that its argument names.
        if interpreter.ends_with("/env")
            && let Some(program) = words.find(|it| !it.starts_with('-') && !it.contains('='))
        {
            self.waiting.extend(self.command(program)?);
        }
        Ok(())
    }

    /// Returns a library that a file needs, from where the loader searches it. Source: ld.so(8); musl
    /// `ldso/dynlink.c`.
    fn library(&self, of: &Found, elf: &ElfFile, name: &[u8]) -> Result<Option<Found>, ReadError> {
        if name.contains(&b'/') {
            return self.root.find_regular(name);
        }
        let variable = self.start.variable("LD_LIBRARY_PATH").unwrap_or_default();
        let variable = variable.split(':').take(PATH_MAX).map(|it| it.as_bytes().to_vec());
        let runpath = with_origin(&elf.runpath, &of.directory);
        let mut rpath = with_origin(&elf.rpath, &of.directory);
        rpath.extend(self.inherited.iter().cloned());
        if !runpath.is_empty() {
            rpath.clear();
        }
        let named = rpath.into_iter().chain(variable).chain(runpath);
        for directory in named.chain(self.directories.iter().cloned()) {
            if !directory.starts_with(b"/") {
                continue;
            }
            let path = [&directory[..], b"/", name].concat();
            let Some(found) = self.root.find_regular(&path)? else { continue };
            let is_right = self.machine(&found.inode)? == Some(elf.machine);
            if is_right {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn machine(&self, inode: &Inode) -> Result<Option<Machine>, ReadError> {
        let bytes = self.root.beginning(inode, elf::HEADER_MAX)?;
        Ok(elf::machine(&bytes))
    }

    /// Adds the blocks of a part of a file.
    fn add_blocks(&mut self, inode: &Inode, part: Range<u64>) -> Result<(), ReadError> {
        let end = part.end.min(part.start.saturating_add(SEGMENT_MAX)).min(inode.size());
        let mut at = part.start;
        while at < end && self.blocks.len() < BLOCKS_MAX {
            let Some(extent) = self.root.image.map(inode, ByteOffset(at))? else { break };
            let length = extent.len.min(end - at);
            if let RunPlace::Data(device, place) = extent.place
                && let Some(device) = device.slot().and_then(|it| self.ids.get(it)).copied()
            {
                for block in place.0 / BLOCK..(place.0.saturating_add(length)).div_ceil(BLOCK) {
                    let Ok(block) = u32::try_from(block) else { break };
                    if self.blocks.len() < BLOCKS_MAX && self.blocks.insert((device, block)) {
                        add_block(&mut self.runs, TraceRun { device, block, blocks: 1 });
                    }
                }
            }
            at += length.max(1);
        }
        Ok(())
    }
}

/// Returns the directories of a search path, with the directory of the file for `$ORIGIN`. Source: ld.so(8).
fn with_origin(path: &[u8], origin: &[u8]) -> Vec<Vec<u8>> {
    let directories = path.split(|it| *it == b':').filter(|it| !it.is_empty()).take(PATH_MAX);
    let resolved = directories.map(|directory| {
        let mut names = [&b"$ORIGIN"[..], b"${ORIGIN}"].into_iter();
        let rest = names.find_map(|name| directory.strip_prefix(name));
        rest.map_or_else(|| directory.to_vec(), |rest| [origin, rest].concat())
    });
    resolved.collect()
}

/// Returns the directories in which the image's loader searches libraries: those of its configuration, then those that
/// it knows.
fn usual_directories<S: ReadAt>(root: &Root<'_, S>) -> Result<Vec<Vec<u8>>, ReadError> {
    let mut of_musl = root.names(b"/etc")?;
    of_musl.retain(|it| it.starts_with(b"ld-musl-") && it.ends_with(b".path"));
    let of_musl = of_musl.iter().map(|it| [b"/etc/", &it[..]].concat());
    let mut included = root.names(b"/etc/ld.so.conf.d")?;
    included.retain(|it| it.ends_with(b".conf"));
    // The usual pattern of an `include` line expands to sorted names.
    included.sort();
    let included = included.iter().map(|it| [b"/etc/ld.so.conf.d/", &it[..]].concat());
    let files = of_musl.chain([b"/etc/ld.so.conf".to_vec()]).chain(included);
    let mut found = Vec::new();
    for path in files.take(CONF_FILES_MAX) {
        let Some(file) = root.find_regular(&path)? else { continue };
        let text = root.beginning(&file.inode, CONF_MAX)?;
        let lines = text.split(|it| matches!(it, b'\n' | b':')).map(<[u8]>::trim_ascii);
        for line in lines.filter(|it| it.starts_with(b"/")) {
            if found.len() < CONFIGURED_MAX && !found.iter().any(|it| it == line) {
                found.push(line.to_vec());
            }
        }
    }
    // Debian's loader knows the directory of its architecture, which has a name such as `x86_64-linux-gnu`.
    for directory in [&b"/lib"[..], b"/usr/lib"] {
        let mut names = root.names(directory)?;
        names.retain(|it| it.windows(7).any(|part| part == b"-linux-"));
        names.truncate(PATH_MAX);
        found.extend(names.iter().map(|it| [directory, b"/", it].concat()));
    }
    let mut libraries = root.names(b"/lib")?;
    libraries.retain(|it| it.starts_with(b"ld-musl-"));
    let usual = if libraries.is_empty() { &OF_GLIBC[..] } else { &OF_MUSL };
    found.extend(usual.iter().map(|it| it.as_bytes().to_vec()));
    Ok(found)
}

/// Adds a block to the last run if it follows it.
pub fn add_block(runs: &mut Vec<TraceRun>, block: TraceRun) {
    match runs.last_mut() {
        Some(last) if last.device == block.device && last.block + last.blocks == block.block => {
            last.blocks += block.blocks;
        }
        _ => runs.push(block),
    }
}
