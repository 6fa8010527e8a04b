"""Lines of real tegrastats logs, as the devices printed them.

The first three are out of the logs of the jetsontools project (MIT License, see NOTICE); the time that
project puts in front of each line is cut off. The others are made up after NVIDIA's documentation
of tegrastats, in the shapes that the logs lack.
"""

AGX_XAVIER = (
    "RAM 2086/15825MB (lfb 2800x4MB) SWAP 0/7912MB (cached 0MB) CPU "
    "[0%@2265,0%@2229,0%@2226,0%@2232,0%@2230,0%@2232,0%@2265,0%@2226] EMC_FREQ 0%@2133 "
    "GR3D_FREQ 0%@905 APE 150 MTS fg 0% bg 7% AO@30C GPU@31C Tdiode@33C PMIC@50C AUX@30.5C "
    "CPU@31.5C thermal@30.95C Tboard@32C GPU 618/540 CPU 1236/1236 SOC 2318/2318 CV 0/0 "
    "VDDRQ 154/154 SYS5V 2934/2934"
)
XAVIER_NX = (
    "06-25-2025 09:41:10 RAM 2170/6855MB (lfb 2x4MB) SWAP 283/3427MB (cached 2MB) CPU "
    "[0%@1420,0%@1421,0%@1421,0%@1420,0%@1421,0%@1420] EMC_FREQ 0%@1866 GR3D_FREQ 0%@1109 "
    "VIC_FREQ 115 APE 150 AUX@40C CPU@41.5C thermal@40.3C AO@39.5C GPU@40C PMIC@50C VDD_IN "
    "5480mW/5480mW VDD_CPU_GPU_CV 940mW/919mW VDD_SOC 1347mW/1347mW"
)
ORIN_NX = (
    "06-25-2025 09:43:10 RAM 3408/15657MB (lfb 176x4MB) SWAP 0/7828MB (cached 0MB) CPU "
    "[0%@960,0%@806,0%@806,0%@806,50%@729,0%@729,0%@729,0%@729] EMC_FREQ 0%@2133 GR3D_FREQ "
    "0%@[305] NVENC off NVDEC off NVJPG off NVJPG1 off VIC off OFA off NVDLA0 off NVDLA1 off "
    "PVA0_FREQ off APE 174 cv0@52.781C cpu@55.375C soc2@52.062C soc0@54.218C cv1@51.875C "
    "gpu@51.562C tj@55.5C soc1@55.5C cv2@51.25C VDD_IN 5469mW/5469mW VDD_CPU_GPU_CV "
    "1011mW/990mW VDD_SOC 1579mW/1579mW"
)

# Channels that are not connected come twice; two graphics clusters have two clocks; DDR is a branch
# of the 5 V rail; two cores are off.
AGX_ORIN = (
    "11-20-2025 10:00:00 RAM 8000/30000MB (lfb 9x4MB) SWAP 1/15000MB (cached 0MB) "
    "CPU [90%@2200,100%@2100,off,off] EMC_FREQ 1%@3199 GR3D_FREQ 14%@[407,611] VIC_FREQ 115 "
    "NVDLA0_FREQ @1600 APE 174 CV0@-256C CPU@77.25C Tboard@62C SOC2@70C Tdiode@82.25C tj@77.5C "
    "VDD_GPU_SOC 3000mW/2900mW VDD_CPU_CV 11000mW/12000mW VIN_SYS_5V0 5000mW/5100mW "
    "NC 0mW/0mW VDDQ_VDD2_1V8AO 1000mW/1000mW NC 0mW/0mW"
)
NANO = (
    "RAM 1234/3964MB (lfb 2x4MB) IRAM 0/252kB(lfb 252kB) CPU [10%,20%,off,off]@921 EMC_FREQ 0%@1600 "
    "GR3D_FREQ 99%@921 APE 25 PLL@41C CPU@43.5C PMIC@100C GPU@42C AO@49C thermal@43C "
    "POM_5V_IN 5012/4800 POM_5V_GPU 1200/900 POM_5V_CPU 800/700"
)
