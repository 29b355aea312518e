//! Tests whether the kernel can execute a program of a root, by the rules of `execve(2)` for the file's first bytes.
//!
//! A runtime detects such an error only in its very last step, and then exits with a code that the program could have
//! returned.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::bundle::path_resolver::{Executable, View};
use crate::runtime::elf::{HEADERS, Headers, Loader, number};

/// Number of files that the kernel opens: a script, its interpreter, and so on. Source: Linux `fs/exec.c`,
/// `exec_binprm`.
const DEPTH: u32 = 6;
/// Number of bytes that the kernel reads to detect a file's format. Source: `linux/binfmts.h`, `BINPRM_BUF_SIZE`.
const START: usize = 256;

/// Where a program is searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Within {
    /// An image from which a container is being created.
    Image,
    /// A running container.
    Container,
}

impl fmt::Display for Within {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Container => "container",
        })
    }
}

/// A program that cannot be executed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// The program does not exist.
    #[error("the {within} has no {program:?}{searched}")]
    NotFound {
        within: Within,
        /// Name or path in the command.
        program: String,
        /// ` in DIRECTORIES` for a name, or empty for a path.
        searched: String,
    },
    /// The file is not executable.
    #[error("{program:?} in the {within} is not an executable file")]
    NotExecutable { within: Within, program: String },
    /// The file is neither a script nor a program that this kernel can execute.
    #[error(
        "{program:?} in the {within} is neither a script nor a program for this machine (exec format error)"
    )]
    Format { within: Within, program: String },
    /// The program is for another machine.
    #[error(
        "{program:?} in the {within} is a program for {machine}, and this machine cannot \
        execute it (exec format error): use the image for linux/{}, or --platform if there are \
        several",
        here()
    )]
    Machine {
        within: Within,
        program: String,
        /// The machine's name in Go (`GOARCH`).
        machine: String,
    },
    /// The interpreter or loader that the program needs does not exist.
    #[error("{program:?} needs {interpreter:?} to run, but the {within} does not have it")]
    NoInterpreter {
        within: Within,
        program: String,
        /// Path of the script's interpreter, or of the loader.
        interpreter: String,
    },
    /// The program is a script whose interpreter is a script, and so on, deeper than Linux allows.
    #[error(
        "{program:?} in the {within} is a script whose interpreter is a script, nested deeper than Linux allows"
    )]
    Nested { within: Within, program: String },
    /// An argument or an environment variable is longer than the kernel allows.
    #[error(
        "{what} has {length} bytes, but arguments and variables have at most {} (argument list \
        too long)",
        longest()
    )]
    TooLong {
        /// `an argument`, or the variable's name.
        what: String,
        /// Length in bytes.
        length: usize,
    },
}

impl ProgramError {
    /// Whether a file is missing, and not merely unusable.
    #[must_use]
    pub const fn is_absent(&self) -> bool {
        match self {
            Self::NotFound { .. } | Self::NoInterpreter { .. } => true,
            Self::NotExecutable { .. }
            | Self::Format { .. }
            | Self::Machine { .. }
            | Self::Nested { .. }
            | Self::TooLong { .. } => false,
        }
    }
}

/// Maximum length of an argument or a variable, in bytes. Source: execve(2), "Limits on size of arguments and
/// environment".
fn longest() -> usize {
    rustix::param::page_size() * 32 - 1
}

/// Returns an error for the first argument or variable that is longer than the kernel allows.
pub(crate) fn too_long(args: &[String], env: &[String]) -> Option<ProgramError> {
    let args = args.iter().map(|it| (it, "an argument".to_owned()));
    let name =
        |it: &str| it.split('=').next().unwrap_or_default().chars().take(40).collect::<String>();
    let env = env.iter().map(|it| (it, format!("the variable \"{}\"", name(it))));
    let (text, what) = args.chain(env).find(|(it, _)| it.len() > longest())?;
    Some(ProgramError::TooLong { what, length: text.len() })
}

/// Reason why a runtime did not start an additional program in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The program or its interpreter does not exist.
    Absent,
    /// The kernel does not execute the program for this user.
    Unusable,
    /// Another reason, which does not concern the program.
    Other,
}

impl Refusal {
    /// Classifies a runtime's error message by phrases that crun 1.8, runc 1.1 and runsc use for programs. Call this
    /// only if no check before the start found an error: the container may have changed the file since, or its user
    /// may not be allowed to execute it. The phrases are not searched for in the name of the `program` itself.
    pub(crate) fn from_message(message: &str, program: &str) -> Self {
        const PROGRAM: [&str; 6] =
            ["exec: ", "executable", "eaccess ", "failed to load ", "error finding ", "execve"];
        const DIRECTORY: [&str; 3] = ["chdir", "cwd", "working directory"];
        const ABSENT: [&str; 2] = ["no such file", "not found"];
        const UNUSABLE: [&str; 4] =
            ["permission denied", "not permitted", "format error", "is a directory"];
        let mut message = message.to_owned();
        for quote in ['"', '`'] {
            message = message.replace(&format!("{quote}{program}{quote}"), "");
        }
        if program.contains('/') {
            message = message.replace(program, "");
        }
        let message = message.to_lowercase();
        let has = |words: &[&str]| words.iter().any(|it| message.contains(it));
        if !has(&PROGRAM) || has(&DIRECTORY) {
            Self::Other
        } else if has(&ABSENT) {
            Self::Absent
        } else if has(&UNUSABLE) {
            Self::Unusable
        } else {
            Self::Other
        }
    }
}

/// A program as named in a command, and the parameters of its search.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamedProgram<'a> {
    pub(crate) program: &'a str,
    /// Directory to which names with a slash are relative.
    pub(crate) working_dir: &'a str,
    /// Directories for other names, in the syntax of `PATH`.
    pub(crate) search: &'a str,
    pub(crate) within: Within,
}

impl NamedProgram<'_> {
    /// Returns the path of the program, or an error if no such file is executable.
    pub(crate) fn resolve(&self, view: &View<'_>) -> Result<PathBuf, ProgramError> {
        let mut refused = false;
        let mut try_path = |path: &Path| match view.executable(path.as_os_str().as_bytes()) {
            // The runtime, which works inside the container, may see files that Quire does not.
            Executable::Yes | Executable::Unknown => true,
            Executable::No => {
                refused = true;
                false
            }
            Executable::Absent => false,
        };
        let (within, program) = (self.within, self.program.to_owned());
        let is_path = program.contains('/');
        let from = Path::new(self.working_dir);
        let found = if is_path {
            Some(from.join(&program)).filter(|path| try_path(path))
        } else {
            let folders = std::env::split_paths(OsStr::new(self.search));
            // A relative or empty directory is relative to the working directory.
            folders.map(|it| from.join(it).join(&program)).find(|path| try_path(path))
        };
        match (found, refused) {
            (Some(path), _) => Ok(path),
            (None, true) => Err(ProgramError::NotExecutable { within, program }),
            (None, false) => {
                let searched = if is_path { String::new() } else { format!(" in {}", self.search) };
                Err(ProgramError::NotFound { within, program, searched })
            }
        }
    }

    /// Returns the reason why the program at `path` will probably not run.
    pub(crate) fn doubt(&self, view: &View<'_>, path: &Path) -> Option<ProgramError> {
        let (within, program) = (self.within, self.program.to_owned());
        Some(match unrunnable(view, Path::new(self.working_dir), path)? {
            Unrunnable::Format => ProgramError::Format { within, program },
            Unrunnable::Machine(machine) => ProgramError::Machine { within, program, machine },
            Unrunnable::Interpreter(interpreter) => {
                ProgramError::NoInterpreter { within, program, interpreter }
            }
            Unrunnable::Refused(program) => ProgramError::NotExecutable { within, program },
            Unrunnable::Nested => ProgramError::Nested { within, program },
        })
    }
}

/// Reason why the kernel cannot execute a file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Unrunnable {
    /// Neither a script nor a program for this machine.
    Format,
    /// A program for another machine, with that machine's name in Go.
    Machine(String),
    /// The root lacks this interpreter of a script, or this loader.
    Interpreter(String),
    /// This interpreter exists, but is not an executable file.
    Refused(String),
    /// The interpreter is a script, whose interpreter is a script, and so on.
    Nested,
}

/// Returns the reason why `path`, an executable file in a container, cannot be executed; `None` if it can be, or if
/// this is unknown. A relative interpreter is searched for in the directory `from`, as the kernel does.
///
/// Formats that `binfmt_misc` adds are not considered, so call this only if a program did not run.
fn unrunnable(view: &View<'_>, from: &Path, path: &Path) -> Option<Unrunnable> {
    let mut path = path.to_owned();
    for _ in 0..DEPTH {
        let start = view.read_start(path.as_os_str().as_bytes(), HEADERS)?;
        let interpreter = match Format::from_bytes(&start) {
            Format::Script(interpreter) => interpreter,
            Format::Elf(Loader::None | Loader::Unread) => return None,
            Format::Elf(Loader::Path(loader)) => {
                let there = view.executable(from.join(&loader).as_os_str().as_bytes());
                return (there == Executable::Absent).then_some(Unrunnable::Interpreter(loader));
            }
            Format::Other => return Some(Unrunnable::Format),
            Format::Foreign(machine) => return Some(Unrunnable::Machine(machine)),
        };
        let next = from.join(&interpreter);
        match view.executable(next.as_os_str().as_bytes()) {
            Executable::Absent => return Some(Unrunnable::Interpreter(interpreter)),
            Executable::No => return Some(Unrunnable::Refused(interpreter)),
            Executable::Yes | Executable::Unknown => path = next,
        }
    }
    Some(Unrunnable::Nested)
}

/// Whether this is a program for this machine that needs no loader, by its first bytes.
pub(crate) fn is_static(start: &[u8]) -> bool {
    matches!(Format::from_bytes(start), Format::Elf(Loader::None))
}

/// Format of a file, as the kernel detects it.
#[derive(Debug, PartialEq, Eq)]
enum Format {
    /// A script, with its interpreter.
    Script(String),
    /// A program that may run on this machine.
    Elf(Loader),
    /// A program for another machine, with that machine's name in Go.
    Foreign(String),
    /// A format that the kernel itself does not know.
    Other,
}

impl Format {
    fn from_bytes(bytes: &[u8]) -> Self {
        if let Some(line) = bytes.strip_prefix(b"#!") {
            // The interpreter ends at a blank, newline or NUL; blanks before it are skipped. Source: Linux
            // `fs/binfmt_script.c`.
            let line = &line[..line.len().min(START - 2)];
            let line = line.split(|byte| matches!(byte, b'\n' | 0)).next().unwrap_or_default();
            let mut words = line.split(|byte| matches!(byte, b' ' | b'\t'));
            let word = words.find(|word| !word.is_empty());
            return word.map_or(Self::Other, |it| Self::Script(lossy(it)));
        }
        if !bytes.starts_with(b"\x7fELF") {
            return Self::Other;
        }
        let (class, order) = (bytes.get(4).copied(), bytes.get(5).copied());
        let native_order = if cfg!(target_endian = "little") { 1 } else { 2 };
        let (Some(machine), Some(class)) = (number::<2>(bytes, 18), class) else {
            return Self::Other;
        };
        let Some(order @ (1 | 2)) = order else { return Self::Other };
        let machine = match u16::try_from(machine) {
            Ok(swapped) if order != native_order => swapped.swap_bytes().into(),
            _ => machine,
        };
        if order != native_order || !is_for_here(machine) {
            return Self::Foreign(machine_name(machine, class, order));
        }
        let headers = match class {
            1 => Headers::ELF32,
            2 => Headers::ELF64,
            _ => return Self::Other,
        };
        if headers.are_wrong(bytes) { Self::Other } else { Self::Elf(headers.loader(bytes)) }
    }
}

/// Whether this machine's kernel may execute programs for `machine`. Kernels also execute the 32-bit programs of the
/// same family, unless they were built without support for these. Source: `linux/elf-em.h`.
fn is_for_here(machine: u64) -> bool {
    let known: &[u64] = match std::env::consts::ARCH {
        "x86_64" => &[62, 3],
        "x86" => &[3],
        "aarch64" => &[183, 40],
        "arm" => &[40],
        "riscv64" => &[243],
        "powerpc64" => &[21, 20],
        "s390x" => &[22],
        "loongarch64" => &[258],
        _ => return true,
    };
    known.contains(&machine)
}

/// Returns a machine's name in Go and `--platform`. `order` is 1 for little endian. Source: `linux/elf-em.h`.
fn machine_name(machine: u64, class: u8, order: u8) -> String {
    let known = match (machine, class, order) {
        (3, ..) => "386",
        (8, 2, 1) => "mips64le",
        (8, 2, _) => "mips64",
        (8, _, 1) => "mipsle",
        (8, ..) => "mips",
        (21, _, 1) => "ppc64le",
        (21, ..) => "ppc64",
        (22, ..) => "s390x",
        (40, ..) => "arm",
        (62, ..) => "amd64",
        (183, ..) => "arm64",
        (243, 2, _) => "riscv64",
        (258, ..) => "loong64",
        _ => return format!("another kind of machine (ELF machine {machine})"),
    };
    known.to_owned()
}

/// Returns this machine's name in Go.
fn here() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "loongarch64" => "loong64",
        "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
        "powerpc64" => "ppc64",
        other => other,
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::bundle::Access;

    /// The messages are those of crun 1.8, runc 1.1 and runsc of 2026.
    #[test]
    fn runtimes_words_tell_what_is_wrong() {
        let sandbox = "executing processes for container: executing command \"x\" in sandbox:";
        let runc = "exec failed: unable to start container process:";
        let cases = [
            ("executable file `x` not found in $PATH: No such file or directory", Refusal::Absent),
            ("open executable: Permission denied", Refusal::Unusable),
            ("open executable: Operation not permitted", Refusal::Unusable),
            ("exec: Exec format error", Refusal::Unusable),
            ("exec: No such file or directory", Refusal::Absent),
            ("chdir `/x`: No such file or directory", Refusal::Other),
            (&format!("{runc} exec: \"x\": executable file not found in $PATH"), Refusal::Absent),
            (&format!("{runc} exec: \"/x\": stat /x: no such file or directory"), Refusal::Absent),
            (&format!("{runc} exec: \"/x\": permission denied"), Refusal::Unusable),
            (&format!("{runc} eaccess /x: permission denied"), Refusal::Unusable),
            (
                &format!(
                    "{runc} chdir to cwd (\"/x\") set in config.json failed: permission denied"
                ),
                Refusal::Other,
            ),
            (
                &format!(
                    "{sandbox} error finding executable \"x\" in PATH [/bin]: no such file or directory"
                ),
                Refusal::Absent,
            ),
            (&format!("{sandbox} failed to load /x: exec format error"), Refusal::Unusable),
            (&format!("{sandbox} failed to load /x: no such file or directory"), Refusal::Absent),
            (
                &format!(
                    "{sandbox} failed to find initial working directory \"/x\": no such file or directory"
                ),
                Refusal::Other,
            ),
            ("the container `x` is not running", Refusal::Other),
            ("", Refusal::Other),
        ];
        for (said, expect) in cases {
            assert_eq!(Refusal::from_message(said, "/x"), expect, "{said}");
        }
    }

    #[test]
    fn a_programs_name_is_not_what_is_wrong_with_it() {
        let said =
            "exec failed: unable to start container process: exec: \"/etc/cwd\": permission denied";
        assert_eq!(Refusal::from_message(said, "/etc/cwd"), Refusal::Unusable);
        assert_eq!(
            Refusal::from_message("exec: \"chdir\": executable file not found", "chdir"),
            Refusal::Absent
        );
        assert_eq!(
            Refusal::from_message("chdir to \"/permission denied\"", "/permission denied"),
            Refusal::Other
        );
    }

    #[test]
    fn what_is_too_long_is_named() {
        let long = |length: usize| "x".repeat(length);
        let said = |args: &[String], env: &[String]| too_long(args, env).map(|it| it.to_string());
        let most = longest();
        assert_eq!(said(&[long(most)], &[long(most)]), None);
        assert!(
            said(&[String::new(), long(most + 1)], &[]).unwrap().starts_with("an argument has")
        );
        let env = ["A=b".to_owned(), format!("LONG={}", long(most))];
        let expect = format!("the variable \"LONG\" has {} bytes", most + 5);
        assert!(said(&[], &env).unwrap().starts_with(&expect));
    }

    #[test]
    fn searches_begin_where_the_program_does() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("den/bin")).unwrap();
        for path in ["den/bin/one", "den/two"] {
            std::fs::write(root.path().join(path), "").unwrap();
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(root.path().join(path), mode).unwrap();
        }
        let root = std::fs::File::open(root.path()).unwrap();
        let view = View::of_running(root.as_fd());
        let check = |program: &str, search: &str, expect: Option<&str>| {
            let named =
                NamedProgram { program, working_dir: "/den", search, within: Within::Container };
            let found = named.resolve(&view).ok();
            assert_eq!(found.as_deref(), expect.map(Path::new), "{program} in {search}");
        };
        check("one", "/bin:bin", Some("/den/bin/one"));
        check("one", "/bin", None);
        check("two", "/bin:", Some("/den/two"));
        check("./two", "", Some("/den/two"));
        check("bin/one", "", Some("/den/bin/one"));
    }

    #[test]
    fn programs_of_other_machines_are_named() {
        // The start of an ELF file with this class, byte order and machine.
        let header = |class: u8, order: u8, machine: [u8; 2]| {
            let mut bytes = b"\x7fELF".to_vec();
            bytes.extend([class, order, 1, 0]);
            bytes.resize(18, 0);
            bytes.extend(machine);
            bytes
        };
        let check = |bytes: &[u8], name: &str| {
            if here() != name {
                assert_eq!(Format::from_bytes(bytes), Format::Foreign(name.to_owned()));
            }
        };
        check(&header(2, 2, [0, 22]), "s390x");
        check(&header(2, 1, [243, 0]), "riscv64");
        check(&header(2, 1, [21, 0]), "ppc64le");
        assert_eq!(Format::from_bytes(&header(2, 3, [183, 0])), Format::Other, "no such order");
    }

    /// A program for this machine with one program header, of the type `kind`. The segment contains `text` and begins
    /// at `start`.
    fn program(headers: &Headers, kind: u32, start: usize, text: &str) -> Vec<u8> {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let mut bytes = own[..64].to_vec();
        bytes.resize(start, 0);
        bytes.extend(text.as_bytes());
        bytes[4] = if headers.is_wide { 2 } else { 1 };
        let (table, width) = (64, if headers.is_wide { 8 } else { 4 });
        let mut put = |at: usize, width: usize, value: usize| {
            let field = &mut bytes[at..at + width];
            field.copy_from_slice(&value.to_le_bytes()[..width]);
            if cfg!(target_endian = "big") {
                field.reverse();
            }
        };
        put(headers.table, width, table);
        put(headers.size, 2, usize::try_from(headers.header).unwrap());
        put(headers.count, 2, 1);
        put(table, 4, usize::try_from(kind).unwrap());
        put(table + headers.start, width, start);
        put(table + headers.length, width, text.len());
        bytes
    }

    #[test]
    fn programs_of_both_classes_name_their_loader() {
        const LOAD: u32 = 1;
        const INTERP: u32 = 3;
        for headers in [Headers::ELF32, Headers::ELF64] {
            let path = |text: &str| Format::Elf(Loader::Path(text.to_owned()));
            let dynamic = program(&headers, INTERP, 200, "/lib/ld.so\0");
            assert_eq!(Format::from_bytes(&dynamic), path("/lib/ld.so"));
            let fixed = program(&headers, LOAD, 200, "/lib/ld.so\0");
            assert_eq!(Format::from_bytes(&fixed), Format::Elf(Loader::None));
            // Only the start of a file is read.
            let start = usize::try_from(HEADERS).unwrap();
            let mut beyond = program(&headers, INTERP, start, "/lib/ld.so\0");
            beyond.truncate(start);
            assert_eq!(Format::from_bytes(&beyond), Format::Elf(Loader::Unread));
            assert!(is_static(&fixed) && !is_static(&dynamic) && !is_static(&beyond));
            let mut other = fixed;
            other[4] = 3;
            assert_eq!(Format::from_bytes(&other), Format::Other, "no such class");
        }
    }

    #[test]
    fn the_kernel_agrees() {
        let root = tempfile::tempdir().unwrap();
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let mut foreign = own.clone();
        // A machine number that is not assigned.
        foreign[18..20].copy_from_slice(&[0xfe; 2]);
        let cases: [(&str, &[u8], bool); 7] = [
            ("own", &own, true),
            ("foreign", &foreign, false),
            ("garbage", b"garbage", false),
            ("empty", b"", false),
            ("nameless", b"#! \n", false),
            ("script", b"#! \t/bin/sh -e\nexit 0\n", true),
            ("nowhere", b"#!/no/such\n", false),
        ];
        let host = std::fs::File::open("/").unwrap();
        let host = View::of_root(host.as_fd(), Access::Writable);
        for (name, bytes, runs) in cases {
            let path = root.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            let mut command = std::process::Command::new(&path);
            // With this argument, the test's own program runs no tests.
            command.arg("--list").stdout(std::process::Stdio::null());
            // A child that another test has just forked may still have the file open for writing for a moment.
            let kernel = loop {
                match command.status() {
                    Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    result => break result.map(|_| ()),
                }
            };
            assert_eq!(kernel.is_ok(), runs, "{name}: {kernel:?}");
            let found = unrunnable(&host, Path::new("/"), &path);
            assert_eq!(found.is_none(), runs, "{name}: {found:?}");
        }
        // In a root without other files, the loader of the test's own program is also missing. A static program needs
        // no loader.
        let alone = std::fs::File::open(root.path()).unwrap();
        let alone = View::of_root(alone.as_fd(), Access::Writable);
        let check = |path: &str, expect: Option<Unrunnable>| {
            assert_eq!(unrunnable(&alone, Path::new("/"), Path::new(path)), expect, "{path}");
        };
        check("/nowhere", Some(Unrunnable::Interpreter("/no/such".to_owned())));
        check("/script", Some(Unrunnable::Interpreter("/bin/sh".to_owned())));
        check("/garbage", Some(Unrunnable::Format));
        let Format::Elf(loader) = Format::from_bytes(&own[..4096]) else { panic!("a program") };
        let loader = match loader {
            Loader::Path(path) => Some(Unrunnable::Interpreter(path)),
            Loader::None | Loader::Unread => None,
        };
        check("/own", loader);
    }
}
