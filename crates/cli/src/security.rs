//! Turns options into the rights of a container.

use std::num::NonZeroU32;
use std::path::Path;

use anyhow::{Context as _, bail};
use container::bundle::PIDS;
use container::bundle::security::{Capabilities, Device, Filter, Interfaces, Profile, Security};

use crate::args::{self, SecurityOpt};

/// More than any profile has.
const LARGEST: u64 = 4 << 20;

/// The most processes and threads; none for no limit.
pub(crate) fn pids(wanted: &args::Security) -> anyhow::Result<Option<NonZeroU32>> {
    match wanted.pids_limit {
        // A runtime refuses a limit that it cannot set.
        None => Ok(Some(PIDS).filter(|_| can_limit_pids())),
        Some(..=0) => Ok(None),
        Some(count) => {
            let count = u32::try_from(count).ok().and_then(NonZeroU32::new);
            Ok(Some(count.context("--pids-limit: the number is too large")?))
        }
    }
}

/// Whether there is a controller for it. Source: cgroups(7).
fn can_limit_pids() -> bool {
    let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers");
    Path::new("/sys/fs/cgroup/pids").exists()
        || controllers.is_ok_and(|it| it.split_whitespace().any(|it| it == "pids"))
}

pub(crate) fn security(wanted: &args::Security) -> anyhow::Result<Security> {
    let mut filter = if wanted.privileged { Filter::Unconfined } else { Filter::Usual };
    let (mut no_new_privileges, mut is_said) = (false, false);
    for option in &wanted.security_opt {
        match option {
            SecurityOpt::NoNewPrivileges(value) => no_new_privileges = *value,
            _ if std::mem::replace(&mut is_said, true) => {
                bail!("--security-opt: seccomp is given twice");
            }
            SecurityOpt::Unconfined => filter = Filter::Unconfined,
            SecurityOpt::Seccomp(path) => filter = Filter::Profile(profile(path)?),
        }
    }
    for limit in &wanted.ulimit {
        limit.check().context("--ulimit")?;
    }
    let mut devices = if wanted.privileged { Device::all() } else { Vec::new() };
    for device in &wanted.device {
        devices.push(Device::find(device).context("--device")?);
    }
    let interfaces = if wanted.privileged { Interfaces::Open } else { Interfaces::Masked };
    Ok(Security {
        capabilities: Capabilities::new(wanted.privileged, &wanted.cap_add, &wanted.cap_drop)?,
        filter,
        no_new_privileges,
        interfaces,
        devices,
        limits: wanted.ulimit.clone(),
    })
}

fn profile(path: &Path) -> anyhow::Result<Profile> {
    use std::io::Read as _;
    let failed = || format!("cannot read the seccomp profile {}", path.display());
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).with_context(failed)?;
    file.take(LARGEST).read_to_end(&mut bytes).with_context(failed)?;
    Profile::read(&bytes).with_context(failed)
}
