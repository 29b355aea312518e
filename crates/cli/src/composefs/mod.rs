//! The composefs tools, chosen by the name under which this binary is called. Options, output and exit codes are
//! those of composefs 1.0.8, so that they can replace the C tools. `docs/composefs-tools.md` lists the intended
//! differences.

mod dump;
mod getopt;
mod info;
mod mkcomposefs;
mod mount;
mod objects;

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::ExitCode;

use getopt::OptionError;
use image::erofs::read::{Cached, Image};
use store::ImageFile;

/// A tool's failure. The tool exits with 1 in either case.
#[derive(Debug)]
enum Failure {
    /// The arguments are invalid; the message is printed with the usage.
    Usage(String),
    /// Any other failure.
    Error(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// Returns a failure that is only a message.
fn refuse<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Error(anyhow::Error::msg(message.into())))
}

fn wrong_option(error: &OptionError) -> Failure {
    Failure::Usage(error.to_string())
}

struct Tool {
    name: &'static str,
    usage: &'static str,
    run: fn(Arguments) -> Result<(), Failure>,
}

/// The arguments after the program's name.
type Arguments = std::vec::IntoIter<OsString>;

const TOOLS: [Tool; 4] = [
    Tool { name: "mkcomposefs", usage: mkcomposefs::USAGE, run: mkcomposefs::run },
    Tool { name: "composefs-info", usage: info::USAGE, run: info::run },
    Tool { name: "composefs-dump", usage: dump::USAGE, run: dump::run },
    Tool { name: "mount.composefs", usage: mount::USAGE, run: mount::run },
];

/// Runs a composefs tool if this program was called by its name, or as `composefs NAME`. Returns `None` otherwise.
pub(crate) fn main(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter();
    let own = arguments.next()?;
    let tool = match by_name(&own) {
        Some(tool) => tool,
        None if arguments.next()? == "composefs" => by_name(&arguments.next()?)?,
        None => return None,
    };
    let arguments = arguments.collect::<Vec<_>>().into_iter();
    // The C tools end silently if their output is closed. Without this call, the Rust tools would print an error.
    let _spoken = kernel::process::die_of(rustix::process::Signal::PIPE);
    Some(match (tool.run)(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = match failure {
                Failure::Usage(message) => {
                    format!("{}: {message}\nUsage: {} {}", tool.name, tool.name, tool.usage)
                }
                Failure::Error(error) => format!("{}: {error:#}", tool.name),
            };
            // A failed write to standard error cannot be reported anywhere.
            drop(writeln!(std::io::stderr(), "{text}"));
            ExitCode::FAILURE
        }
    })
}

/// Returns the names of the tools with their usages.
pub(crate) fn usages() -> impl Iterator<Item = (&'static str, &'static str)> {
    TOOLS.iter().map(|tool| (tool.name, tool.usage))
}

fn by_name(path: &OsStr) -> Option<&'static Tool> {
    let name = Path::new(path).file_name()?;
    TOOLS.iter().find(|tool| tool.name.as_bytes() == name.as_bytes())
}

/// Opens an image that composefs made. It is read on demand, because it may be larger than memory.
fn read_image(path: &OsStr) -> Result<Image<Cached<ImageFile>>, Failure> {
    use anyhow::Context as _;
    let open = || format!("Failed to open '{}'", path.display());
    let load = || format!("Failed to load '{}'", path.display());
    let file = match ImageFile::open(Path::new(path)) {
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
            Err(error).with_context(load)?
        }
        other => other.with_context(open)?,
    };
    Ok(Image::open(Cached::new(file)).with_context(load)?)
}
