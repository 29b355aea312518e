//! Builds commands in one line, in the syntax of the crate xshell.

use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use xshell::Shell;

/// Returns a command. A string literal is a list of words with variables: `"mount -o loop {file} {target}"`. Any other
/// expression is one word, except `..expression`, which is a list of words.
macro_rules! cmd {
    ($text:literal $(, $($rest:tt)*)?) => {{
        let mut words = crate::command::words!($text).into_iter();
        let program = words.next().expect("a literal has a word");
        crate::command::more!(::std::process::Command::new(program), ..words $(, $($rest)*)?)
    }};
    ($program:expr, $($rest:tt)*) => {
        crate::command::more!(::std::process::Command::new($program), $($rest)*)
    };
}

/// Returns a command with more words, which are written as those of [`cmd!`].
macro_rules! more {
    ($command:expr, $($rest:tt)*) => {{
        let mut command = $command;
        crate::command::append!(command, $($rest)*);
        command
    }};
}

macro_rules! append {
    ($command:ident $(,)?) => {};
    ($command:ident, $text:literal $(, $($rest:tt)*)?) => {
        $command.args(crate::command::words!($text));
        crate::command::append!($command $(, $($rest)*)?);
    };
    ($command:ident, ..$words:expr $(, $($rest:tt)*)?) => {
        $command.args($words);
        crate::command::append!($command $(, $($rest)*)?);
    };
    ($command:ident, $word:expr $(, $($rest:tt)*)?) => {
        $command.arg($word);
        crate::command::append!($command $(, $($rest)*)?);
    };
}

macro_rules! words {
    ($text:literal) => {
        crate::command::split(|shell| xshell::cmd!(shell, $text).into())
    };
}

/// Runs the command of [`cmd!`] and returns its output. Any exit code except 0 is an error.
macro_rules! run {
    ($($words:tt)*) => { ::rig::process::quiet(&mut crate::command::cmd!($($words)*)) };
}

/// Words of a command of xshell, whose settings, such as the working folder, would slow down the timed start.
pub(crate) fn split(make: impl FnOnce(&Shell) -> Command) -> Vec<OsString> {
    let command = make(&Shell::new().expect("the working folder exists"));
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsString::from).collect()
}

pub(crate) use {append, cmd, more, run, words};

/// The commands of one run.
pub(crate) trait Commands {
    fn list(self) -> Result<Vec<Command>>;
}

impl Commands for Command {
    fn list(self) -> Result<Vec<Command>> {
        Ok(vec![self])
    }
}

impl Commands for Vec<Command> {
    fn list(self) -> Result<Vec<Command>> {
        Ok(self)
    }
}

impl<const N: usize> Commands for [Command; N] {
    fn list(self) -> Result<Vec<Command>> {
        Ok(self.into())
    }
}

impl<C: Commands> Commands for Result<C> {
    fn list(self) -> Result<Vec<Command>> {
        self?.list()
    }
}

/// Runs commands, one after the other. Any exit code except 0 is an error.
pub(crate) fn run_all(commands: impl Commands) -> Result<()> {
    commands.list()?.iter_mut().try_for_each(|it| rig::process::quiet(it).map(drop))
}

/// Waits until a condition holds, which is checked after each pause.
pub(crate) fn wait_until(
    what: &str,
    limit: Duration,
    pause: Duration,
    mut is_so: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let begun = Instant::now();
    while !is_so()? {
        if begun.elapsed() > limit {
            bail!("waited for {what} for {} s", limit.as_secs());
        }
        std::thread::sleep(pause);
    }
    Ok(())
}
