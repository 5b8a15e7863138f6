"""Known devices from their data sheets, and what part of the sheets' rates large kernels reach."""

from __future__ import annotations

from specmemo_kernels.planning.device import GIB, DeviceProfile

#: Shares of the data sheet's rates that large kernels reach. Measured on an H200: 4.3 of 4.8 TB/s for a copy, 788 of
#: 989 TFLOP/s for a bf16 product.
READ_SHARE, MATMUL_SHARE = 0.9, 0.8
#: The same of a CPU.
CPU_SHARE = 0.7
#: Host seconds of an operator in eager mode: on a GPU Python, torch's dispatcher and the launch.
EAGER_LAUNCH, CPU_LAUNCH = 8e-6, 5e-6
#: Assumed for phones and single-board computers, whose cores run Python several times slower than a desktop's.
SMALL_CPU_LAUNCH = 20e-6


def _gpu(
    name: str, gib: float, gb_per_s: float, tflops16: float, tflops32: float, shared_kib: int = 0,
    target: str | None = None, link_gb: float = 25.0, link: str = "pcie",
) -> DeviceProfile:  # fmt: skip
    """A GPU from its data sheet: dense 16-bit matrix rate with float32 sums, float32 vector rate.

    ``target``: of the Triton kernels; ``None`` for GPUs without kernels of this package.
    """
    tflops = {"float16": tflops16, "float32": tflops32} | ({} if target == "sm_75" else {"bfloat16": tflops16})
    return DeviceProfile(
        name, int(gib * GIB), gb_per_s * 1e9 * READ_SHARE, {k: v * 1e12 * MATMUL_SHARE for k, v in tflops.items()},
        EAGER_LAUNCH, True, shared_kib << 10, target, "triton" if target else None, link_gb * 1e9, link,
    )  # fmt: skip


def _apple(chip: str, gib: int, gb_per_s: float, tflops: float) -> DeviceProfile:
    """The GPU of an Apple chip. 16-bit products run at float32's rate.

    Metal's ``recommendedMaxWorkingSetSize``: two thirds of up to 32 GB (10.67 of 16, 21.33 of 32), three quarters of
    more (48 of 64), as llama.cpp's logs print it.
    """
    return _gpu(f"Apple {chip} GPU, {gib} GB", gib * (2 / 3 if gib <= 32 else 3 / 4), gb_per_s, tflops, tflops)


def _cpu(name: str, gib: int, gb_per_s: float, gflops: dict[str, float], launch: float = CPU_LAUNCH) -> DeviceProfile:
    """A CPU; reading, computing and the host don't overlap."""
    rates = {dtype: rate * 1e9 * CPU_SHARE for dtype, rate in gflops.items()}
    return DeviceProfile(name, gib * GIB, gb_per_s * 1e9 * CPU_SHARE, rates, launch, overlaps=False)


#: Compute capabilities of GeForce and Jetson. Ada's Triton target stands for Blackwell's (:mod:`kernel_target`).
_TURING, _AMPERE, _ADA = (64, "sm_75"), (99, "sm_86"), (99, "sm_89")
_JETSON, _RDNA3 = (163, "sm_86"), (64, "gfx1100")

#: Known devices by their command line names. A desktop GPU's profile has its full driver name; laptop GPUs have none
#: that a driver gives, as their rates depend on the laptop's power limit. Links: NVLink 3 and 4, one Infinity Fabric
#: link, else PCI Express. Shared memory per program: CUDA C++ programming guide, table of compute capabilities; 64 KiB
#: of LDS on CDNA and RDNA. GeForce since Ampere: 16-bit products with float32 sums at twice the float32 rate.
KNOWN_DEVICES: dict[str, DeviceProfile] = {
    # NVIDIA Titan RTX product page: 24 GB, 672 GB/s, 130 TFLOPS tensor, 16.3 float32. Turing has no bfloat16.
    "titan-rtx": _gpu("NVIDIA TITAN RTX", 24, 672, 130.5, 16.3, *_TURING),
    # NVIDIA Turing whitepaper, GeForce cards: half of the tensor rate (51.6) with float32 sums; 336 GB/s.
    "rtx-2060": _gpu("NVIDIA GeForce RTX 2060", 6, 336, 25.8, 6.45, *_TURING),
    # NVIDIA Ampere GA102 and GA106 whitepapers and product pages.
    "rtx-3060": _gpu("NVIDIA GeForce RTX 3060", 12, 360, 25.5, 12.7, *_AMPERE),
    "rtx-3080": _gpu("NVIDIA GeForce RTX 3080", 10, 760, 59.5, 29.8, *_AMPERE),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090", 24, 936, 71.2, 35.6, *_AMPERE),
    # Laptops, by cores and boost clock of a medium power limit: 2560 at 1.49 GHz, 96 bits; 3840 at 1.43 GHz, 192 bits.
    "rtx-3050-laptop": _gpu("RTX 3050 for laptops, 6 GB", 6, 168, 15.3, 7.6, *_AMPERE),
    "rtx-3060-laptop": _gpu("RTX 3060 for laptops", 6, 336, 21.9, 10.9, *_AMPERE),
    # NVIDIA Ada GPU architecture whitepaper, appendix A, and product pages.
    "rtx-4060": _gpu("NVIDIA GeForce RTX 4060", 8, 272, 30.2, 15.1, *_ADA),
    "rtx-4060-ti-16gb": _gpu("NVIDIA GeForce RTX 4060 Ti", 16, 288, 44.1, 22.1, *_ADA),
    "rtx-4070": _gpu("NVIDIA GeForce RTX 4070", 12, 504, 58.3, 29.1, *_ADA),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 24, 1008, 165.2, 82.6, *_ADA),
    # NVIDIA's laptop page: 321 AI TOPS (sparse fp8) at the highest power, an eighth of it for 16 bits.
    "rtx-4070-laptop": _gpu("RTX 4070 for laptops", 8, 256, 40.1, 20.1, *_ADA),
    # NVIDIA Blackwell product pages: AI TOPS (sparse fp4) over 16; cores times boost clock.
    "rtx-5060": _gpu("NVIDIA GeForce RTX 5060", 8, 448, 38.4, 19.2, *_ADA),
    "rtx-5060-ti-16gb": _gpu("NVIDIA GeForce RTX 5060 Ti", 16, 448, 47.4, 23.7, *_ADA),
    "rtx-5070": _gpu("NVIDIA GeForce RTX 5070", 12, 672, 61.8, 30.9, *_ADA),
    # NVIDIA A100 80GB SXM data sheet: 2039 GB/s, 312, 19.5.
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80, 2039, 312.0, 19.5, 163, "sm_80", 300.0, "nvlink"),
    # NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s, 989 dense (1979 with sparsity), 67.
    "h100": _gpu("NVIDIA H100 80GB HBM3", 80, 3350, 989.4, 66.9, 227, "sm_90", 450.0, "nvlink"),
    # NVIDIA H200 data sheet: 141 GB (140 GiB as the driver counts), 4.8 TB/s, rates of the H100.
    "h200": _gpu("NVIDIA H200", 140, 4800, 989.4, 66.9, 227, "sm_90", 450.0, "nvlink"),
    # AMD Instinct MI250 data sheet, halved: the card is two devices. 128 GB, 3.2768 TB/s, 362.1, 45.3 in all.
    "mi250": _gpu("AMD Instinct MI250", 64, 1638, 181.0, 22.6, 64, "gfx90a", 50.0, "infinity-fabric"),
    # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1307.4, 163.4.
    "mi300x": _gpu("AMD Instinct MI300X", 192, 5300, 1307.4, 163.4, 64, "gfx942", 64.0, "infinity-fabric"),
    # AMD product pages: peak half and single precision.
    "rx-7600": _gpu("AMD Radeon RX 7600", 8, 288, 43.5, 21.8, *_RDNA3),
    "rx-7800-xt": _gpu("AMD Radeon RX 7800 XT", 16, 624, 74.6, 37.3, *_RDNA3),
    "rx-7900-xtx": _gpu("AMD Radeon RX 7900 XTX", 24, 960, 122.8, 61.4, *_RDNA3),
    # Intel product page: 233 TOPS of int8, half of it in 16 bits; 2560 lanes at 2.67 GHz; 456 GB/s.
    "arc-b580": _gpu("Intel Arc B580", 12, 456, 116.5, 13.7),
    # NVIDIA Jetson AGX Orin series technical brief: 64 GB shared with the host, 204.8 GB/s, 42.5 dense fp16, 5.3.
    "jetson-orin": _gpu("Jetson AGX Orin", 64, 204.8, 42.5, 5.3, *_JETSON),
    # NVIDIA Jetson Orin Nano data sheet: 40 TOPS (sparse int8), 1024 cores at 625 MHz; Super: 67 TOPS, 1020 MHz.
    "jetson-orin-nano": _gpu("Jetson Orin Nano", 8, 68, 10.0, 1.28, *_JETSON),
    "jetson-orin-nano-super": _gpu("Jetson Orin Nano Super", 8, 102, 16.7, 2.09, *_JETSON),
    # Apple's specifications and newsroom: bandwidth, and 2.6 (M1), 3.6 (M2), 5.2 (M1 Pro), 6.8 (M2 Pro), 10.4 (M1 Max),
    # 13.6 (M2 Max) TFLOPS. M3 and M4: cores times 256 operations times 1.4 and 1.47 GHz (M4 Max: 1.68).
    "m1-8gb": _apple("M1", 8, 68, 2.6),
    "m1-16gb": _apple("M1", 16, 68, 2.6),
    "m1-pro-16gb": _apple("M1 Pro", 16, 200, 5.2),
    "m1-max-32gb": _apple("M1 Max", 32, 400, 10.4),
    "m2-8gb": _apple("M2", 8, 100, 3.6),
    "m2-16gb": _apple("M2", 16, 100, 3.6),
    "m2-24gb": _apple("M2", 24, 100, 3.6),
    "m2-pro-16gb": _apple("M2 Pro", 16, 200, 6.8),
    "m2-max-64gb": _apple("M2 Max", 64, 400, 13.6),
    "m3-8gb": _apple("M3", 8, 100, 3.6),
    "m3-16gb": _apple("M3", 16, 100, 3.6),
    "m3-pro-18gb": _apple("M3 Pro", 18, 150, 6.4),
    "m3-max-48gb": _apple("M3 Max", 48, 400, 14.3),
    "m4-16gb": _apple("M4", 16, 120, 3.8),
    "m4-24gb": _apple("M4", 24, 120, 3.8),
    "m4-pro-24gb": _apple("M4 Pro", 24, 273, 7.5),
    "m4-max-64gb": _apple("M4 Max", 64, 546, 17.2),
    # Eight cores with AVX2 at 3.5 GHz (32 float32 operations a cycle and core), two channels of DDR4-3200.
    "cpu": _cpu("CPU, 8 cores", 16, 51.2, {"float32": 8 * 3.5 * 32}),
    # Qualcomm's product brief: 12 Oryon cores, LPDDR5X-8448 of 128 bits (135 GB/s). Four 128-bit pipes a core, 3.4 GHz.
    "snapdragon-x-elite": _cpu(
        "Snapdragon X Elite CPU", 16, 135, {"float32": 12 * 3.4 * 32, "float16": 12 * 3.4 * 64}
    ),
    # Qualcomm's product brief: LPDDR5X-9600 of 64 bits (77 GB/s); Cortex-X4 at 3.3 GHz with four pipes, five A720 at
    # 3.0 with two. The two A520 aren't counted.
    "snapdragon-8-gen-3": _cpu(
        "Snapdragon 8 Gen 3 CPU", 12, 77, {"float32": 3.3 * 32 + 15 * 16, "float16": 3.3 * 64 + 15 * 32},
        SMALL_CPU_LAUNCH,
    ),
    # Raspberry Pi 5 product brief: LPDDR4X-4267 of 32 bits; four Cortex-A76 at 2.4 GHz, two 128-bit pipes.
    "raspberry-pi-5-8gb": _cpu(
        "Raspberry Pi 5, 8 GB", 8, 17, {"float32": 4 * 2.4 * 16, "float16": 4 * 2.4 * 32}, SMALL_CPU_LAUNCH
    ),
    "raspberry-pi-5-16gb": _cpu(
        "Raspberry Pi 5, 16 GB", 16, 17, {"float32": 4 * 2.4 * 16, "float16": 4 * 2.4 * 32}, SMALL_CPU_LAUNCH
    ),
}  # fmt: skip


def same_name(one: str, other: str) -> bool:
    """Whether two driver names are equal apart from case, spaces and vendor."""
    a, b = (" ".join(n.casefold().split()).removeprefix("nvidia ").removeprefix("amd ") for n in (one, other))
    return a == b


def known_device(name: str) -> DeviceProfile:
    """The entry of :data:`KNOWN_DEVICES` with this key or full driver name; case is ignored.

    A part of a name doesn't match, as laptop, Ti, PCIe and MIG variants are other devices.

    Raises:
        ValueError: unknown device; the message lists the known ones.
    """
    if name.casefold() in KNOWN_DEVICES:
        return KNOWN_DEVICES[name.casefold()]
    match = next((profile for profile in KNOWN_DEVICES.values() if same_name(profile.name, name)), None)
    if match is None:
        raise ValueError(
            f"unknown device {name!r}, known are {', '.join(KNOWN_DEVICES)} and their full driver names; measure "
            'others: specmemo probe, or describe them: "8GiB, 100GB/s, 5TFLOP/s fp16"'
        )
    return match
