//! `wait`: waits until containers end, and prints their exit codes.

use anyhow::{Context as _, bail};
use clap::Args;
use container::life::background;
use container::life::lookup::find_container;
use container::life::state::{Code, Reason};
use serde::Serialize;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// Names of containers; their exit codes are printed in this order
    #[arg(required = true)]
    pub(crate) containers: Vec<String>,
}

impl VerbArgs for Wait {
    const NAME: &'static str = "wait";
    const ABOUT: &'static str = "Wait until containers end, and print their exit codes";
    const EXAMPLES: &'static str = "quire wait web";
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        wait(context, self)
    }
}

/// A line of `wait --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct WaitReport {
    /// Id of the container.
    container: String,
    /// Exit code.
    code: i32,
    /// Whether the disk lost some of the container's writes.
    lost: bool,
    /// Cause of the end: `timeout` or `memory`. Null for any other cause.
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    reason: Option<Reason>,
}

pub(crate) fn wait(context: &Context, args: &Wait) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::read())?;
    for name in &args.containers {
        let found = find_container(&store, name)?;
        if found.is_created {
            bail!("container {0} has not been started: `quire start {0}` starts it", found.id);
        }
        // The file of the exit code is opened now, because the container may be removed as soon as it has ended.
        let kept = Code::open(&found.folder)
            .with_context(|| format!("cannot read the exit code of container {}", found.id))?;
        background::wait(None, &|| found.is_alive(&store))?;
        let state = found.state_now()?;
        let lost = state.as_ref().is_some_and(|it| it.lost);
        let reason = state.as_ref().and_then(|it| it.reason);
        let code = state.and_then(|it| it.code);
        let code = code.or_else(|| kept?.read());
        let code = code.with_context(|| {
            format!(
                "the exit code of container {} is unknown: it was removed, or its monitor was \
                killed",
                found.id
            )
        })?;
        if context.json {
            let container = found.id.clone();
            report::json_line(&WaitReport { container, code, lost, reason })?;
        } else {
            report::line(&code.to_string())?;
        }
        let lost = lost.then_some(container::life::end::ended::LOST);
        for remark in lost.into_iter().chain(reason.map(Reason::sentence)) {
            report::error_line(&format!("quire: {}: {remark}", found.id));
        }
    }
    Ok(Answer::Yes)
}
