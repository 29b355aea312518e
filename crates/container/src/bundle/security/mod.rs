//! Rights of a container beyond its namespaces: capabilities, system calls, devices and limits.

mod capabilities;
mod devices;
mod labels;
mod limits;
mod seccomp;

use serde::{Deserialize, Serialize};

use crate::bundle::choices::Kind;
use crate::bundle::spec::{DeviceRule, RuntimeSpec};
use crate::bundle::user::User;

pub(crate) use capabilities::of_user;
pub use capabilities::{Capabilities, CapabilityError};
pub(crate) use devices::OwnDevice;
pub use devices::{Device, DeviceError};
pub use labels::{
    AppArmor, AppArmorState, LabelError, PROFILE, ProfileChoice, ProfileRequest, SeLinuxState,
    Starter, load, parser,
};
pub(crate) use limits::of_caller;
pub use limits::{Limit, RlimitError};
pub use seccomp::{Filter, FilterError, Profile};

/// Access of a container to the kernel's interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Interfaces {
    /// Interfaces that expose or control the host are hidden or read-only.
    #[default]
    Masked,
    /// All interfaces are visible, `/sys` is writable, and all devices can be opened.
    Open,
}

/// Rights of a container.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Security {
    /// Capabilities of the container's root.
    pub capabilities: Capabilities,
    /// Filter of the container's system calls.
    pub filter: Filter,
    /// AppArmor profile of the container's programs.
    pub apparmor: AppArmor,
    /// Whether programs are kept from getting more rights than their parent.
    pub no_new_privileges: bool,
    pub interfaces: Interfaces,
    /// Devices of the host in the container.
    pub devices: Vec<Device>,
    /// Limits of the container's processes.
    pub limits: Vec<Limit>,
}

impl Security {
    /// Adapts the rights to a runtime. gVisor itself filters system calls and accepts no other filter. It has few
    /// devices, and does not support AppArmor profiles.
    ///
    /// # Errors
    /// [`FilterError`] if the runtime does not support a requested filter, profile or device.
    pub fn fit(&mut self, kind: Kind) -> Result<(), FilterError> {
        // With open interfaces, the list contains all devices of the host, which the caller did not request
        // individually.
        let is_asked = kind == Kind::Runsc && self.interfaces == Interfaces::Masked;
        if let Some(device) = self.devices.iter().find(|it| is_asked && !it.is_in_gvisor()) {
            return Err(FilterError::Device(device.path().to_owned()));
        }
        // gVisor ignores profiles. Source: gVisor, runsc/specutils/specutils.go, `ValidateSpec`.
        match &self.apparmor {
            AppArmor::Named(name) if kind == Kind::Runsc => {
                return Err(FilterError::AppArmor(name.clone()));
            }
            AppArmor::Usual if kind == Kind::Runsc => self.apparmor = AppArmor::Unconfined,
            _ => {}
        }
        match (&self.filter, kind) {
            (Filter::Profile(_), Kind::Runsc) => Err(FilterError::Runtime),
            (Filter::Usual | Filter::Socketcall, Kind::Runsc) => {
                self.filter = Filter::Unconfined;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Looks up the devices of the host again, because their numbers may have changed since, such as after a restart
    /// of the host. A container that sees all devices gets those that the host has now.
    ///
    /// # Errors
    /// [`DeviceError`] if a device that the caller requested is missing.
    pub fn renew(&mut self) -> Result<(), DeviceError> {
        let renewed = self.devices.iter().map(Device::renewed);
        self.devices = match self.interfaces {
            Interfaces::Masked => renewed.collect::<Result<_, _>>()?,
            Interfaces::Open => {
                let mut all = Device::all();
                let moved = renewed.filter_map(Result::ok).filter(Device::is_moved);
                all.extend(moved);
                all
            }
        };
        Ok(())
    }

    /// Writes the rights into a runtime's configuration, except the device nodes.
    pub(crate) fn write(&self, user: &User, spec: &mut RuntimeSpec) {
        let process = &mut spec.process;
        process.capabilities = self.capabilities.entry(user.uid);
        process.no_new_privileges = self.no_new_privileges;
        process.apparmor_profile = self.apparmor.entry();
        process.rlimits = self.limits.iter().map(Limit::entry).collect();
        let linux = &mut spec.linux;
        linux.seccomp = self.filter.entry(&self.capabilities);
        let each = |allow| {
            let access = Some("rwm".to_owned());
            DeviceRule { allow, kind: None, major: None, minor: None, access }
        };
        linux.resources.devices = match self.interfaces {
            Interfaces::Open => vec![each(true)],
            Interfaces::Masked => {
                [each(false)].into_iter().chain(self.devices.iter().map(Device::rule)).collect()
            }
        };
    }
}

/// Writes devices into a runtime's configuration. A user namespace cannot create nodes, so it gets mounts where they
/// are needed.
pub(crate) fn write_devices(devices: &[Device], in_user_namespace: bool, spec: &mut RuntimeSpec) {
    for device in devices {
        match device.mount().filter(|_| in_user_namespace) {
            Some(mount) => spec.mounts.push(mount),
            None => spec.linux.devices.push(device.entry()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// gVisor ignores the profile, and reports this only in its log. Source: gVisor, runsc/specutils/specutils.go.
    #[test]
    fn gvisor_has_no_profile_of_apparmor() {
        let of =
            |apparmor: &AppArmor| Security { apparmor: apparmor.clone(), ..Security::default() };
        let named = AppArmor::Named("a".to_owned());
        for apparmor in [AppArmor::Unconfined, AppArmor::Usual, named.clone()] {
            for kind in [Kind::Crun, Kind::Runc] {
                let mut security = of(&apparmor);
                security.fit(kind).unwrap();
                assert_eq!(security.apparmor, apparmor, "{kind:?}");
            }
        }
        let mut security = of(&AppArmor::Usual);
        security.fit(Kind::Runsc).unwrap();
        assert_eq!(security.apparmor, AppArmor::Unconfined);
        let error = of(&named).fit(Kind::Runsc).unwrap_err().to_string();
        assert!(error.contains("runsc does not support AppArmor profile"), "{error}");
    }
}
