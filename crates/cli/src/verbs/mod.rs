//! The verbs, grouped by subject.
//!
//! A verb is one file with its arguments, its report and its function, and a row of the table below. Help, man pages,
//! completions and `--json` come from these.

mod command_line;
pub(crate) mod command_words;
pub(crate) mod containers;
#[cfg(all(test, feature = "disk", feature = "serve"))]
mod documents;
pub(crate) mod enter_namespace;
#[cfg(test)]
mod example;
pub(crate) mod exit_codes;
pub(crate) mod groups;
pub(crate) mod help;
pub(crate) mod images;
#[cfg(all(test, feature = "disk", feature = "registry"))]
mod json;
pub(crate) mod mounts;
pub(crate) mod option_groups;
pub(crate) mod podman_hints;
#[cfg(all(test, feature = "disk", feature = "registry", feature = "serve"))]
mod promises;
#[cfg(feature = "serve")]
pub(crate) mod run_defaults;
#[cfg(feature = "serve")]
pub(crate) mod services;
pub(crate) mod store;
pub(crate) mod usage;

use clap::{Args, Command, Subcommand};

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::option_groups::OptionGroup;

pub(crate) use command_line::{Cli, command};

/// The arguments of a verb, and its properties for the command line.
//
// The structs with arguments have no doc comment, because it would replace `ABOUT` when a verb is called.
pub(crate) trait VerbArgs: Args {
    /// The verb on the command line.
    const NAME: &'static str;
    /// An alias of the verb.
    const ALIAS: Option<&'static str> = None;
    /// One line of description, as in `quire --help`.
    const ABOUT: &'static str;
    /// Further paragraphs of the long help, separated by empty lines.
    const DETAILS: &'static str = "";
    /// Example command lines. All but the first are indented by two spaces.
    const EXAMPLES: &'static str;
    /// Groups of options in help. Options in none of them come first.
    const GROUPS: &'static [OptionGroup] = &[];
    /// The exit codes for failures, which help lists below the examples.
    const EXIT_CODES: ExitCodes = ExitCodes::Kinds;
    /// Whether the verb accepts `--json`.
    const PRINTS_JSON: bool = true;
    /// Whether `-q` stands for `--quiet`, as in podman. Other verbs use the letter for something else, or for nothing.
    const HAS_SHORT_QUIET: bool = false;
    /// Whether `-h` prints the help. Verbs that start containers use it for `--hostname`.
    const HAS_SHORT_HELP: bool = true;

    /// Runs the verb.
    fn call(&self, context: &Context) -> anyhow::Result<Answer>;
}

/// A row of the table of verbs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VerbRow {
    /// Heading of the verb's group in `quire --help`.
    pub(crate) group: &'static str,
    pub(crate) name: &'static str,
    pub(crate) examples: &'static str,
    pub(crate) exit_codes: ExitCodes,
    pub(crate) groups: &'static [OptionGroup],
    pub(crate) prints_json: bool,
    pub(crate) alias: Option<&'static str>,
    pub(crate) about: &'static str,
    pub(crate) details: &'static str,
    has_short_help: bool,
    /// Whether `-q` stands for `--quiet`.
    pub(crate) has_short_quiet: bool,
}

impl VerbRow {
    const fn for_verb<T: VerbArgs>(group: &'static str) -> Self {
        Self {
            group,
            name: T::NAME,
            examples: T::EXAMPLES,
            exit_codes: T::EXIT_CODES,
            groups: T::GROUPS,
            prints_json: T::PRINTS_JSON,
            alias: T::ALIAS,
            about: T::ABOUT,
            details: T::DETAILS,
            has_short_help: T::HAS_SHORT_HELP,
            has_short_quiet: T::HAS_SHORT_QUIET,
        }
    }

    /// Adds the verb's help to its command.
    pub(crate) fn describe(&self, command: Command) -> Command {
        let mut command = command.about(self.about).disable_help_flag(!self.has_short_help);
        if !self.details.is_empty() {
            command = command.long_about(format!("{}\n\n{}", self.about, self.details));
        }
        match self.alias {
            Some(alias) => command.visible_alias(alias),
            None => command,
        }
    }
}

macro_rules! verbs {
    ($($group:literal { $($(#[$cfg:meta])? $name:ident($args:ty),)* })*) => {
        /// A verb with its arguments.
        //
        // The options of a verb are created when it is called, because those of all verbs take as long as the rest
        // of the start.
        #[derive(Debug, Subcommand)]
        #[command(defer = true)]
        pub(crate) enum Verb {
            $($($(#[$cfg])? #[command(name = <$args as VerbArgs>::NAME)] $name(Box<$args>),)*)*
        }

        impl Verb {
            pub(crate) fn call(&self, context: &Context) -> anyhow::Result<Answer> {
                match self {
                    $($($(#[$cfg])? Self::$name(args) => args.call(context),)*)*
                }
            }

            /// Returns the verb's row of the table.
            pub(crate) const fn row(&self) -> VerbRow {
                match self {
                    $($($(#[$cfg])? Self::$name(_) => VerbRow::for_verb::<$args>($group),)*)*
                }
            }
        }

        /// All verbs, in the order of `quire --help`.
        pub(crate) const VERBS: &[VerbRow] =
            &[$($($(#[$cfg])? VerbRow::for_verb::<$args>($group),)*)*];
    };
}

// A verb whose group is new begins that group in `quire --help`.
verbs! {
    "Images" {
        Import(images::import::Import),
        #[cfg(feature = "registry")]
        Pull(images::registry::pull::Pull),
        Images(images::images::Images),
        Show(images::show::Show),
        Inspect(containers::access::inspect::Inspect),
        History(images::history::History),
        Ls(images::ls::Ls),
        Tree(images::tree::Tree),
        Cat(images::cat::Cat),
        Diff(images::diff::Diff),
        Dump(images::dump::Dump),
        Mount(mounts::mount::Mount),
        Umount(mounts::umount::Umount),
        Export(images::export::Export),
        Save(images::archives::save::Save),
        Load(images::archives::load::Load),
        #[cfg(feature = "registry")]
        Push(images::registry::push::Push),
        #[cfg(feature = "signatures")]
        Sign(images::signing::sign::Sign),
        Tag(images::names::tag::Tag),
        Untag(images::names::untag::Untag),
        Rmi(images::names::rmi::Rmi),
        Convert(images::convert::Convert),
        Index(images::index::Index),
        Merge(images::merge::Merge),
        Filter(images::filter::Filter),
        #[cfg(feature = "registry")]
        Referrers(images::registry::referrers::Referrers),
        #[cfg(feature = "registry")]
        Login(images::registry::login::Login),
        #[cfg(feature = "registry")]
        Logout(images::registry::logout::Logout),
    }
    "Containers" {
        Run(containers::run::Run),
        Create(containers::create::Create),
        Start(containers::start::Start),
        Restart(containers::restart::Restart),
        Ps(containers::ps::Ps),
        Logs(containers::logs::Logs),
        Attach(containers::access::attach::Attach),
        Exec(containers::exec::Exec),
        Cp(containers::access::cp::Cp),
        Port(containers::access::port::Port),
        Stop(containers::stop::Stop),
        Kill(containers::access::kill::Kill),
        Wait(containers::wait::Wait),
        Rm(containers::rm::Rm),
        Volume(containers::volumes::verb::Volume),
        Network(containers::networks::verb::Network),
        Commit(containers::commit::Commit),
        Snapshot(containers::snapshots::snapshot::Snapshot),
        Fork(containers::snapshots::fork::Fork),
        Rollback(containers::snapshots::rollback::Rollback),
        Bundle(containers::bundle::Bundle),
    }
    "Store" {
        Du(store::du::Du),
        Verify(store::verify::Verify),
        Fsck(store::fsck::Fsck),
        Gc(store::gc::Gc),
        Share(store::share::Share),
        Unseal(store::unseal::Unseal),
    }
    "Tools" {
        Build(images::build::Build),
        #[cfg(feature = "serve")]
        Serve(services::serve::Serve),
        #[cfg(feature = "serve")]
        Trace(containers::trace::Trace),
        Doctor(store::doctor::Doctor),
        Info(store::info::Info),
        Version(store::version::ShowVersion),
        System(store::system::System),
        Image(groups::ImageGroup),
        Container(groups::ContainerGroup),
        Completions(store::completions::Completions),
        Man(store::man::Man),
        #[cfg(test)]
        Example(example::Example),
    }
}

/// Returns the row of a verb by its name.
pub(crate) fn row(name: &str) -> Option<&'static VerbRow> {
    VERBS.iter().find(|it| it.name == name)
}
