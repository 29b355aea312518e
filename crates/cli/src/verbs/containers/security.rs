//! Turns options into the rights of a container.

use std::num::NonZeroU32;
use std::path::Path;

use anyhow::{Context as _, bail};
use container::bundle::PIDS;
use container::bundle::security::{
    AppArmor, AppArmorState, Capabilities, Device, Filter, Interfaces, PROFILE, Profile,
    ProfileChoice, ProfileRequest, SeLinuxState, Security, Starter, load, parser,
};

use crate::args::{self, SecurityOpt};
use crate::session::context::Context;

/// Returns the maximum number of processes and threads; `None` means no limit.
pub(crate) fn pids(wanted: &args::Security) -> anyhow::Result<Option<NonZeroU32>> {
    match wanted.pids_limit {
        // Without the option, the default limit is set only if this is possible, because a runtime refuses a limit
        // that it cannot set.
        None => Ok(Some(PIDS).filter(|_| can_limit_pids())),
        Some(..=0) => Ok(None),
        Some(count) => {
            let count = u32::try_from(count).ok().and_then(NonZeroU32::new);
            Ok(Some(count.context("--pids-limit: the number is too large")?))
        }
    }
}

/// Returns whether the host has a controller for the limit. Source: cgroups(7).
fn can_limit_pids() -> bool {
    let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers");
    Path::new("/sys/fs/cgroup/pids").exists()
        || controllers.is_ok_and(|it| it.split_whitespace().any(|it| it == "pids"))
}

/// Returns the rights that options ask for; `profile` is the result of [`profile`].
pub(crate) fn security(
    wanted: &args::Security,
    mut profile: Option<Profile>,
) -> anyhow::Result<Security> {
    let mut filter = if wanted.privileged { Filter::Unconfined } else { Filter::Usual };
    let (mut no_new_privileges, mut socketcall, mut is_said) = (false, false, false);
    for option in &wanted.security_opt {
        match option {
            SecurityOpt::NoNewPrivileges(value) => no_new_privileges = *value,
            SecurityOpt::AppArmor(_) | SecurityOpt::Label => {}
            SecurityOpt::Socketcall(value) => socketcall = *value,
            _ if std::mem::replace(&mut is_said, true) => {
                bail!("--security-opt: seccomp occurs twice");
            }
            SecurityOpt::Unconfined => filter = Filter::Unconfined,
            SecurityOpt::Seccomp(path) => {
                let unread = || format!("cannot read the seccomp profile {}", path.display());
                filter = Filter::Profile(profile.take().with_context(unread)?);
            }
        }
    }
    match filter {
        Filter::Usual if socketcall => filter = Filter::Socketcall,
        Filter::Profile(_) if socketcall => {
            bail!(
                "--security-opt socketcall changes only the default profile: allow the call in \
                your profile"
            );
        }
        _ => {}
    }
    for limit in &wanted.ulimit {
        limit.check().context("--ulimit")?;
    }
    let mut devices = if wanted.privileged { Device::all() } else { Vec::new() };
    for device in &wanted.device {
        devices.push(Device::from_argument(device).context("--device")?);
    }
    let interfaces = if wanted.privileged { Interfaces::Open } else { Interfaces::Masked };
    Ok(Security {
        capabilities: Capabilities::new(wanted.privileged, &wanted.cap_add, &wanted.cap_drop)?,
        filter,
        // [`apparmor`] sets the profile later, because the profile depends on the host.
        apparmor: AppArmor::Unconfined,
        no_new_privileges,
        interfaces,
        devices,
        limits: wanted.ulimit.clone(),
    })
}

/// Reads the seccomp profile that the options name, if they name one. Its file may be a pipe without a writer, so
/// this is called while signals still end the process.
pub(crate) fn profile(wanted: &args::Security) -> anyhow::Result<Option<Profile>> {
    let path = wanted.security_opt.iter().find_map(|it| match it {
        SecurityOpt::Seccomp(path) => Some(path),
        _ => None,
    });
    let Some(path) = path else { return Ok(None) };
    let failed = || format!("cannot read the seccomp profile {}", path.display());
    let bytes = crate::session::settings::option_file::read(path).with_context(failed)?;
    Ok(Some(Profile::read(&bytes).with_context(failed)?))
}

/// Returns the AppArmor profile of a container, and loads it if the host lacks it. Prints a remark if a profile should
/// be used but is not available.
pub(crate) fn apparmor(context: &Context, wanted: &args::Security) -> anyhow::Result<AppArmor> {
    let mut wish = &ProfileRequest::Default;
    for option in &wanted.security_opt {
        let SecurityOpt::AppArmor(found) = option else { continue };
        if std::mem::replace(&mut wish, found) != &ProfileRequest::Default {
            bail!("--security-opt: apparmor occurs twice");
        }
    }
    choose_apparmor(context, wish, wanted.privileged)
}

/// Returns the AppArmor profile of a container that is started again.
pub(crate) fn apparmor_again(context: &Context, before: &Security) -> anyhow::Result<AppArmor> {
    let is_privileged = before.interfaces == Interfaces::Open;
    match &before.apparmor {
        AppArmor::Unconfined => Ok(AppArmor::Unconfined),
        // The profile may not be loaded since the last start of the host.
        AppArmor::Usual => choose_apparmor(context, &ProfileRequest::Default, is_privileged),
        AppArmor::Named(name) => {
            choose_apparmor(context, &ProfileRequest::Named(name.clone()), is_privileged)
        }
    }
}

fn choose_apparmor(
    context: &Context,
    wish: &ProfileRequest,
    is_privileged: bool,
) -> anyhow::Result<AppArmor> {
    let starter = match (context.who().is_host_root(), is_privileged) {
        (true, false) => Starter::Root,
        (true, true) => Starter::PrivilegedByRoot,
        (false, _) => Starter::User,
    };
    let choice = AppArmorState::probe().choose(wish, starter).context("--security-opt")?;
    let why = match choice {
        ProfileChoice::Use(apparmor) => return Ok(apparmor),
        ProfileChoice::Unlisted => UNLISTED.to_owned(),
        ProfileChoice::Load => match load(&context.search()) {
            Ok(()) => return Ok(AppArmor::Usual),
            Err(error) if *wish != ProfileRequest::Default => {
                return Err(error).context("--security-opt");
            }
            Err(error) => crate::output::report::chain(&error),
        },
    };
    context.remark(&format!("the container has no AppArmor profile: {why}"));
    Ok(AppArmor::Unconfined)
}

/// Reason why no profile can be used.
const UNLISTED: &str = "cannot read /sys/kernel/security/apparmor/profiles (is securityfs mounted on /sys/kernel/security?)";

/// Prints a remark that labels have no effect if options ask for them while SELinux is enforcing.
pub(crate) fn remark_on_labels(context: &Context, wanted: &args::ContainerOptions) {
    let options = &wanted.security.security_opt;
    let is_asked = options.contains(&SecurityOpt::Label) || args::ask_for_labels(wanted);
    if is_asked && SeLinuxState::probe() == SeLinuxState::Enforcing {
        context.remark(
            "SELinux is enforcing, but quire sets no labels: label=, z and Z have no effect, and \
            SELinux does not separate this container from the host",
        );
    }
}

/// Describes in one line for people how security modules protect containers.
pub(crate) fn describe_labels(context: &Context) -> String {
    let is_root = context.outside().is_host_root();
    let apparmor = match AppArmorState::probe() {
        AppArmorState::Off => "AppArmor is off".to_owned(),
        AppArmorState::On { own: Some(own), .. } => {
            format!("containers inherit this process's AppArmor profile {own}")
        }
        AppArmorState::On { .. } if !is_root => {
            "AppArmor is on, but only root's containers can have a profile".to_owned()
        }
        AppArmorState::On { loaded: None, .. } => format!("no AppArmor profile: {UNLISTED}"),
        AppArmorState::On { loaded: Some(loaded), .. } => {
            if loaded.iter().any(|it| it == PROFILE) {
                format!("root's containers have the AppArmor profile {PROFILE}")
            } else if parser(&context.search()).is_some() {
                format!(
                    "root's containers have the AppArmor profile {PROFILE}, which the next `run` loads"
                )
            } else {
                "no AppArmor profile: apparmor_parser is not installed (Debian: package apparmor)"
                    .to_owned()
            }
        }
    };
    match SeLinuxState::probe() {
        SeLinuxState::Idle => apparmor,
        SeLinuxState::Enforcing => {
            format!("{apparmor}; SELinux is enforcing, but quire sets no labels")
        }
    }
}
