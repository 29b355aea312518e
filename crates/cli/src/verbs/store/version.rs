//! `version`: prints the version, in podman's format.

use clap::Args;
use serde::Serialize;

use crate::Answer;
use crate::output::{report, template};
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::store::info::VersionInfoReport;

// Named after the verb; clap has a flag of the name `version`.
#[derive(Debug, Args)]
pub(crate) struct ShowVersion {
    /// Print this Go template, such as {{.Client.Version}}, or json
    #[arg(short, long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
}

impl VerbArgs for ShowVersion {
    const NAME: &'static str = "version";
    const ABOUT: &'static str = "Show the version of Quire";
    const EXAMPLES: &'static str = "quire version\n  quire version --format json";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        version(context, self)
    }
}

/// Report of `version --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "PascalCase")]
pub(crate) struct VersionReport {
    /// This program. There is no server.
    client: VersionInfoReport,
}

fn version(context: &Context, args: &ShowVersion) -> anyhow::Result<Answer> {
    let report = VersionReport { client: VersionInfoReport::new() };
    let format = args.format.as_deref().filter(|it| !it.is_empty());
    if let Some(format) = format.filter(|it| !template::is_json(it)) {
        let value = serde_json::to_value(&report)?;
        template::print(&(template::render(format, &value)? + "\n"))?;
        return Ok(Answer::Yes);
    }
    report::print(context.json || format.is_some(), &report, |VersionReport { client }, out| {
        writeln!(out, "Client:       Quire")?;
        writeln!(out, "Version:      {}", client.version)?;
        if !client.git_commit.is_empty() {
            writeln!(out, "Git Commit:   {}", client.git_commit)?;
        }
        writeln!(out, "OS/Arch:      {}", client.os_arch)
    })?;
    Ok(Answer::Yes)
}
